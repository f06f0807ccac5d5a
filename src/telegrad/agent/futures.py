"""The future of a call: a real ``torch.futures.Future`` that can be awaited, and that reads its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import torch


class Future(torch.futures.Future[Any]):
    """What ``rpc_async`` returns."""

    _help: Callable[[], None] | None = None

    def wait(self) -> Any:
        """Blocks until the answer is here; reads it from the connection itself where no other thread does."""
        help_read = self._help
        if help_read is not None and not self.done():
            help_read()
        return super().wait()

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def done(_: torch.futures.Future[Any]) -> None:
            loop.call_soon_threadsafe(wake)

        self.add_done_callback(done)
        yield from arrived
        return super().wait()
