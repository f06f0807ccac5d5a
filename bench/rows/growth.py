"""How the time of a backward pass grows: with the sends of its context, and with the nodes of its graph.

A row is one point.  ``n`` sends are ``n`` calls with one tensor, all in flight at once; as many results come back.
"""

from __future__ import annotations

from functools import partial

from bench.library import Library
from bench.row import Plan, Point, Row
from bench.rows.context_fan_out import FanOut
from bench.rows.local_backward import LocalGraph
from bench.rows.passes import BackwardOnly

__all__ = ["POINTS"]


def _sends(library: Library, peer: str, *, size: int) -> BackwardOnly:
    return BackwardOnly(library, FanOut(library, peer, size))


def _nodes(library: Library, peer: str, *, size: int) -> BackwardOnly:
    return BackwardOnly(library, LocalGraph(size))


def _of_sends(size: int, plan: Plan, quick: Plan | None) -> Row:
    point = Point("sends", "backward against the sends of a context", "sends", size)
    return Row(f"sends_{size}", f"{size:,} sends", partial(_sends, size=size), plan, quick, point=point)


def _of_nodes(size: int, plan: Plan, quick: Plan | None) -> Row:
    point = Point("nodes", "backward against the nodes on one worker", "nodes", size)
    return Row(f"nodes_{size}", f"{size:,} nodes", partial(_nodes, size=size), plan, quick, point=point)


POINTS = (
    _of_sends(1, Plan(warmup=5, samples=30), Plan(1, 3)),
    _of_sends(10, Plan(warmup=3, samples=15), Plan(1, 3)),
    _of_sends(100, Plan(warmup=1, samples=5), Plan(1, 1)),
    _of_sends(300, Plan(warmup=1, samples=3), None),
    _of_sends(1000, Plan(warmup=1, samples=1), None),
    _of_nodes(1600, Plan(warmup=2, samples=10), Plan(1, 3)),
    _of_nodes(5000, Plan(warmup=1, samples=5), Plan(1, 1)),
    _of_nodes(16000, Plan(warmup=1, samples=2), None),
    _of_nodes(50000, Plan(warmup=1, samples=1), None),
)
