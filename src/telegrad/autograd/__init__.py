"""Gradients through calls: what crosses between workers inside a context is recorded, and one ``backward`` runs through
all of it.

* :func:`context`: one forward and backward
* :func:`backward`: computes gradients on every worker, into the context
* :func:`get_gradients`: what this worker's leaves got
* :func:`debug_info`: what this worker knows of contexts and passes

Inside: ``functions`` (send and recv), ``context``, ``attach`` (to messages), ``missing_context`` (warns), ``graph``
(reads torch's), ``diffusion`` ◇, ``plan`` ◇, ``local_pass`` ◇ (what to do), ``passes``, ``turn``, ``runner``,
``leaves``, ``reducers`` (DDP), ``engine`` (do it), ``api``.
"""

from telegrad.autograd.api import backward, context, debug_info, get_gradients, is_available

__all__ = ["backward", "context", "debug_info", "get_gradients", "is_available"]
