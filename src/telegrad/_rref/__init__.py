"""Remote references.

=================== ================================================================================================
``owner_counts``    which handles and forks exist of this worker's values (the owner's side of the ledger)
``ledger``          how references are counted; no I/O: events in, instructions out
``references``      carries out the ledger's instructions: messages, values of this worker, lost workers
``rref``            ``RRef``, the class that users see
=================== ================================================================================================
"""
