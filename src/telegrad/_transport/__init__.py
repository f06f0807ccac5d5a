"""Byte streams between authenticated workers, and the memory that messages are received into.

=================== ================================================================================================
``base``            ``Stream``: what the rest of telegrad asks of a connection
``sockets``         Unix and TCP sockets: streams over them, listening, connecting
``tls``             mutual TLS 1.3 for TCP: certificates, contexts, the encrypted stream
``handshake``       proof that both ends hold the job's secret; no I/O, bytes in and bytes out
``identity``        the peer's process or certificate, as the kernel or TLS reports it
``admission``       runs TLS and the handshake on one connection
``listener``        accepts connections and hands over those that have authenticated
``dial``            connects to a worker and authenticates
``refusals``        a log with a bounded number of lines
``buffers``         pools of memory for received buffers
``shared_memory``   big buffers between processes of one host
``copier``          copies big pieces of memory with two threads
=================== ================================================================================================
"""
