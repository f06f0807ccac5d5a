"""Gradients through calls: what crosses workers inside a context is recorded, and one ``backward`` runs through all of
it.

* :func:`context`: one forward and backward
* :func:`backward`: computes gradients on every worker, into the context
* :func:`get_gradients`: the gradients of this worker's leaves
* :func:`debug_info`: what this worker knows of contexts and passes

Inside, from the bottom up (◇: no threads, sockets or clock):

* the forward: ``functions`` (send and recv), ``context``, ``interceptors`` (of messages), ``missing_context``
* deciding: ``graph`` (reads torch's), ``termination`` ◇, ``discovery`` ◇, ``local_pass`` ◇, ``backward_pass``
* doing it: ``gates``, ``run`` (calls torch's engine), ``accumulate`` (into leaves), ``ddp``
* between workers: ``passes``, ``handlers`` (of messages), ``context_end``, ``diagnostics``
* ``engine`` (a pass from its beginning to its end), ``api``
"""

from telegrad.autograd.api import backward, context, debug_info, get_gradients, is_available

__all__ = ["backward", "context", "debug_info", "get_gradients", "is_available"]
