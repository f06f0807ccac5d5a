"""The traffic of one worker.

peers       what a worker knows of the others
marshal     values to and from the bodies of messages, over one link
calls       the caller's side of a call
dispatch    the callee's side: finds the function, runs it, hands its result on
coroutines  runs ``async def`` functions
failures    exceptions across the wire
futures     what ``rpc_async`` returns
liveness    finds peers that are dead although their connections look open
agent       puts these together: peers, messages, lost workers
barrier     a graceful shutdown
"""
