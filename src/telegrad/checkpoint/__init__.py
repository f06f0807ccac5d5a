"""Save and restore what lives on many workers.

* :func:`save`: modules, optimizers, anything with a ``state_dict``; each owner writes its own part
* :func:`load`: into the same things, wherever they live now
* :func:`read`: the states themselves, in one process and without workers
* :func:`latest`, :func:`steps`: the steps of the checkpoints in a folder
* :class:`Checkpoint`: what ``load`` returns; :class:`CheckpointError`: what it raises
"""

from telegrad.checkpoint.folder import latest, steps
from telegrad.checkpoint.loading import Checkpoint, load, read
from telegrad.checkpoint.saving import save
from telegrad.errors import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "latest", "load", "read", "save", "steps"]
