"""The corpus: frames of every message type, from programs that real workers run."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from telegrad import autograd, rpc
from telegrad._ids import GlobalId
from telegrad._transport.shared_memory import Proof
from telegrad._wire import codec
from telegrad._wire.frames import PREFIX
from telegrad._wire.messages import ForkRequest, Message

from .workers import RecordedJob, recorded_job

MOST_OF_A_KIND = 400
_SECONDS = 10.0

MESSAGE_KINDS = frozenset(kind.__name__ for kind in get_args(Message))
#: What bodies are made of.
BODY_KINDS = frozenset(("tree", "pickle", "inline", "streamed", "shared", "composite", "conjugate", "rref", "context"))


@dataclass(frozen=True)
class Captured:
    kind: str  # the message's type
    from_dialler: bool
    header: bytes
    stream: bytes
    features: frozenset[str] = frozenset()

    @property
    def raw(self) -> bytes:
        return PREFIX.pack(b"tgr\x01", len(self.header), len(self.stream)) + self.header + self.stream


@dataclass
class Corpus:
    frames: list[Captured]
    keep: list[Any] = field(default_factory=list)  # shared memory that the frames name

    def kinds(self) -> set[str]:
        return {frame.kind for frame in self.frames}

    def features(self) -> set[str]:
        return {feature for frame in self.frames for feature in frame.features}

    def without_pickle(self) -> Corpus:
        return Corpus([frame for frame in self.frames if "pickle" not in frame.features], self.keep)


def capture(proof: Proof, rounds: int = 5) -> Corpus:
    """Runs the programs with and without pickle.  ``proof``: of the process that will send the frames again."""
    seen: dict[bytes, Captured] = {}
    counts: Counter[tuple[str, bool]] = Counter()
    keep: list[Any] = []
    for allow_pickle in (False, True):
        for number in range(2):
            with recorded_job("a", "b", "c", allow_pickle=allow_pickle, proof=proof) as job:
                for turn in range(rounds):
                    torch.manual_seed(turn)
                    for program in PROGRAMS if allow_pickle else PLAIN_PROGRAMS:
                        with job.on("a"):
                            program(job)
                keep += job.segments()
                if number:  # the second job loses a worker
                    _lose_a_worker(job)
            for from_dialler, raw in job.frames():
                frame = _captured(from_dialler, raw)
                if counts[frame.kind, allow_pickle] < MOST_OF_A_KIND and raw not in seen:
                    counts[frame.kind, allow_pickle] += 1
                    seen[raw] = frame
    return Corpus(list(seen.values()), keep)


def _captured(from_dialler: bool, raw: bytes) -> Captured:
    _, header_size, _ = PREFIX.unpack_from(raw)
    header = raw[PREFIX.size : PREFIX.size + header_size]
    message = codec.decode(header)
    return Captured(type(message).__name__, from_dialler, header, raw[PREFIX.size + header_size :], _features(message))


def _features(message: Any) -> frozenset[str]:
    body = getattr(message, "body", None)
    if body is None:
        return frozenset()
    found = {
        "tree": body.tree is not None,
        "pickle": body.pickle >= 0,
        "inline": any(type(buffer) is bytearray for buffer in body.buffers),
        "streamed": any(type(buffer) is int for buffer in body.buffers),
        "shared": any(type(buffer).__name__ == "InSegment" for buffer in body.buffers),
        "composite": any(meta.parts for meta in body.tensors),
        "conjugate": any(meta.flags & 4 for meta in body.tensors),
        "rref": bool(body.rrefs),
        "context": body.extra is not None,
    }
    return frozenset(name for name, there in found.items() if there)


# --- programs, which run on worker a ----------------------------------------------------------------------------


def _plain_data(job: RecordedJob) -> None:
    value = {"a": [1, 2.5, "text", b"bytes", None, True], "b": (1, {2, 3}, frozenset((4,)), 1j, slice(1, 2), ...)}
    rpc.rpc_sync("b", "fuzz.echo", (value, range(5), torch.float32, torch.device("cpu"), torch.Size((2, 3))))
    rpc.rpc_async("b", "fuzz.echo", (bytearray(b"x"), -(1 << 40)), {}).wait()
    rpc.rpc_sync("b", torch.add, (torch.ones(2), torch.ones(2)), {"alpha": 2})
    rpc.rpc_sync("b", "fuzz.echo", (None,))


def _tensors(job: RecordedJob) -> None:
    x = torch.randn(4, 6)
    quantized = torch.quantize_per_tensor(x, 0.1, 3, torch.quint8)
    channels = torch.quantize_per_channel(x, torch.ones(4), torch.zeros(4, dtype=torch.long), 0, torch.qint8)
    complex_one = torch.randn(3, dtype=torch.complex64)
    kinds: list[Any] = [x, x.t(), x[::2, ::3], x.expand(2, 4, 6), x.bool(), x.to(torch.bfloat16), torch.tensor(1.5)]
    kinds += [torch.empty(0, 3), torch.nn.Parameter(x), complex_one, complex_one.conj(), complex_one.conj().imag]
    kinds += [
        x.to_sparse(),
        x.to_sparse_csr(),
        x.to_sparse_bsr((2, 2)),
        quantized,
        channels,
        torch.ones(2, device="meta"),
    ]
    for tensor in kinds:
        rpc.rpc_sync("b", "fuzz.echo", (tensor,))
    rpc.rpc_sync("b", "fuzz.echo", (x, x[1:], x.view(-1)))  # they share memory
    rpc.rpc_sync("b", "fuzz.echo", (torch.randn(10_000),))  # beside the header
    rpc.rpc_sync("b", "fuzz.echo", (torch.randn(20_000),))  # in shared memory


def _failures(job: RecordedJob) -> None:
    for function, args in (("fuzz.fail", ("text",)), ("fuzz.missing", ()), ("fuzz.scale", (1, 2, 3))):
        try:
            rpc.rpc_sync("b", function, args)
        except Exception:
            pass


def _references(job: RecordedJob) -> None:
    rref = rpc.remote("b", "fuzz.echo", (torch.ones(2),))
    rref.to_here(_SECONDS)
    rref.rpc_sync().sum()
    rref.remote().mul(2).to_here(_SECONDS)
    rpc.rpc_sync("b", "fuzz.hold", (rref,))
    rpc.rpc_sync("c", "fuzz.read", (rref,))  # c becomes a user: ForkRequest and its answers
    rpc.rpc_sync("b", "fuzz.pass_on", ("c", rpc.RRef(1)))  # b shares a reference of a with c
    broken = rpc.remote("b", "fuzz.fail", ("remote",))
    try:
        broken.to_here(_SECONDS)
    except ValueError:
        pass
    # A fork of a value that a never made, which only a job that lost a worker would ask for.
    job["c"].agent.send_message(job["a"].id, ForkRequest(GlobalId(job["a"].id, 99), GlobalId(job["c"].id, 99)))
    del rref, broken
    gc.collect()


def _gradients(job: RecordedJob) -> None:
    x = torch.ones(2, requires_grad=True)
    for mode in ("smart", "fast"):
        with autograd.context() as context_id:
            y = rpc.rpc_sync("b", "fuzz.scale", (x,))
            z = rpc.rpc_sync("b", "fuzz.relay", ("c", y))
            held = rpc.remote("c", "fuzz.scale", (z,)).to_here(_SECONDS)
            autograd.backward(context_id, [(held + z).sum()], mode=mode, timeout=_SECONDS)
            autograd.get_gradients(context_id)


def _meeting_sources(job: RecordedJob) -> None:
    """On b two sources meet, so it asks which of them are live."""
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        one = rpc.rpc_sync("b", "fuzz.keep", (context_id, x))
        other = rpc.rpc_sync("c", "fuzz.relay", ("a", one))
        two = rpc.rpc_sync("b", "fuzz.use_kept", (context_id, other))
        autograd.backward(context_id, [two.sum()], timeout=_SECONDS)
    with autograd.context() as context_id:
        one = rpc.rpc_sync("b", "fuzz.keep", (context_id, x))
        two = rpc.rpc_sync("b", "fuzz.use_kept", (context_id, x))
        autograd.backward(context_id, [two.sum()], timeout=_SECONDS)


def _failing_backward(job: RecordedJob) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("c", "fuzz.scale", (rpc.rpc_sync("b", "fuzz.broken_scale", (x,)),))
        try:
            autograd.backward(context_id, [y.sum()], timeout=_SECONDS)
        except Exception:
            pass


class Thing:
    """Only pickle can carry it."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _pickles(job: RecordedJob) -> None:
    shared: list[Any] = [1, torch.ones(3)]
    rpc.rpc_sync("b", "fuzz.echo", (Thing(1), shared, shared))
    rpc.rpc_sync("b", "fuzz.echo", (Thing(torch.randn(20_000)),))
    rpc.rpc_sync("b", "fuzz.echo", (Thing(torch.randn(10_000).numpy()),))
    try:
        rpc.rpc_sync("b", "fuzz.fail", (Thing(2),))
    except ValueError:
        pass


Program = Callable[[RecordedJob], None]
PLAIN_PROGRAMS: tuple[Program, ...] = (
    _plain_data,
    _tensors,
    _failures,
    _references,
    _gradients,
    _meeting_sources,
    _failing_backward,
)
PROGRAMS: tuple[Program, ...] = (*PLAIN_PROGRAMS, _pickles)


def _lose_a_worker(job: RecordedJob) -> None:
    """c knows of a context from b, which dies: c asks a, who made it, to tell it of the end (TellMe)."""
    x = torch.ones(2, requires_grad=True)
    with job.on("a"), autograd.context():
        rpc.rpc_sync("b", "fuzz.relay", ("c", x))
        job["b"].abandon()
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline and not any(_is_tell_me(raw) for _, raw in job.frames()):
            time.sleep(0.01)


def _is_tell_me(raw: bytes) -> bool:
    return _captured(True, raw).kind == "TellMe"
