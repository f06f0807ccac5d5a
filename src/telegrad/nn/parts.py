"""The state of a module without the values of the RemoteModules in it, which their owners save and load."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

REMOTE = "<remote>"  # after the prefix of a RemoteModule: the key of its reference


class OwnState(OrderedDict[str, Any]):
    """``module.state_dict(destination=OwnState())`` has a reference to each RemoteModule in the place of its values.

    ``load_state_dict`` leaves a RemoteModule alone if what it is given has that reference.
    """

    def __init__(self) -> None:
        super().__init__()
        self._metadata: OrderedDict[str, Any] = OrderedDict()  # as torch's own has
