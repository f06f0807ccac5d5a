"""Remote references.

=================== ================================================================================================
``forks``           the states of a fork and the transitions between them
``instructions``    what the ledger tells its caller to do
``ledger``          the protocol that counts references; no I/O, events in and instructions out
``references``      carries out the ledger's instructions: messages, values of this worker, lost workers
``rref``            ``RRef``, the class that users see
=================== ================================================================================================
"""
