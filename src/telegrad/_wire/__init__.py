"""Python values and messages to bytes, and back.  No sockets and no threads.

=================== ================================================================================================
``messages``        every message, and which side of a link may send it
``codec``           a message to the header of a frame, and back
``frames``          frames to bytes, and bytes to frames
``values``          a Python value to a message's body, and back: the entry point of the modules below
``tree``            plain data, without pickle
``tensors``         packs tensors: what describes them, and which buffers hold them
``unpack_tensors``  rebuilds tensors, and checks what describes them
``aliasing``        finds tensors that share memory
``dtypes``          the codes of dtypes, layouts and representations
``pickles``         everything that is not plain data, by pickle or cloudpickle
``callables``       functions by name; what ``allow_pickle=False`` lets others call
``by_value``        functions without a name, as pickles that are kept and reused
=================== ================================================================================================
"""
