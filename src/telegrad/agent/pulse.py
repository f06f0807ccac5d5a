"""The watch over peers that fall silent: their host died, the network is cut, or the process was stopped.

Whoever dialled a link asks for a sign of life when there was none for a quarter of the heartbeat.  A peer that gives
none for all of it counts as lost.  One that closes its connections needs no such watch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from telegrad.agent.link import Link
from telegrad.agent.peers import Peer
from telegrad.agent.pool import Pool
from telegrad.wire.messages import Ping


class Pulse:
    """``lost`` is told of a link whose peer is silent for too long, and why that is so."""

    def __init__(self, heartbeat: float, pool: Pool, lost: Callable[[Link, str], None]) -> None:
        self._heartbeat = heartbeat
        self._pool = pool
        self._lost = lost
        self._last_look = time.monotonic()

    def look(self, now: float, others: Iterable[Peer]) -> None:
        """Called at each tick of the clock, with all peers but this worker itself."""
        # If this very process was stopped meanwhile (a Ctrl-Z, a laptop that slept), it has not listened either.
        was_away = now - self._last_look > self._heartbeat / 2
        self._last_look = now
        for peer in others:
            for link in peer.links:
                if was_away:
                    link.last_heard = now
                self._check(link, peer, now)

    def _check(self, link: Link, peer: Peer, now: float) -> None:
        silence = now - link.last_heard
        if silence > self._heartbeat:
            self._lost(link, f"it was silent for {silence:.0f} s")
        elif link.dialled and min(silence, now - link.pinged) > self.patience(peer) / 4:
            link.pinged = now
            # A full socket would block the clock, so a thread of the pool asks.
            self._pool.submit((lambda link, _: link.send(Ping()), link, None))
        elif link.has_posted():
            self._pool.submit((lambda link, _: link.flush(), link, None))

    def patience(self, peer: Peer) -> float:
        """The shorter patience of the two sides: the other one counts our silence by its own."""
        theirs = peer.record.heartbeat
        return min(self._heartbeat, theirs) if theirs else self._heartbeat
