"""Modules that live on other workers.

* :class:`RemoteModule`: an ``nn.Module`` whose forward runs on the worker that holds it
"""

from telegrad.nn.remote_module import RemoteModule

__all__ = ["RemoteModule"]
