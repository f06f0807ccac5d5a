"""The data plane in plain Python.

scheduler   which thread does what: decisions only
pending     a call that waits for its answer
link        frames over one connection
poller      where idle threads wait
timer       the thread that ticks
plane       the threads
"""
