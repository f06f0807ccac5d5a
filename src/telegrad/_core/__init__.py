"""The data plane: moves frames between workers, and owns the threads that do it.

interface   what the rest of telegrad may ask of it
python/     the implementation that is always there
"""
