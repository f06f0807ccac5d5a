"""The table of torch's public names is complete and true, and ``docs/migration.md`` has it."""

from __future__ import annotations

import types

import pytest

from conformance import names
from conformance.names import Part

PARTS = names.load()

# torch's own optimizers for RPC are TorchScript; importing them warns.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.theirs)
def test_every_name_is_in_the_state_that_is_written(part: Part) -> None:
    assert names.problems(part) == []


def test_the_document_has_the_table() -> None:
    document = names.DOCUMENT.read_text()
    assert names.rewritten(document, PARTS) == document, "python -m tests.conformance.names writes it"


def test_the_modules_are_the_public_ones() -> None:
    assert {part.theirs for part in PARTS} >= {
        "torch.distributed.rpc",
        "torch.distributed.rpc.functions",
        "torch.distributed.autograd",
        "torch.distributed.optim.DistributedOptimizer",
        "torch.distributed.nn.RemoteModule",
    }


# --- the check itself -------------------------------------------------------------------------------------------------


class Theirs:
    def moved(self, a: int, b: int = 1) -> None: ...
    def kept(self, a: int, b: int = 1) -> None: ...
    def gone(self) -> None: ...


class Ours:
    def moved(self, a: int, c: int = 1) -> None: ...
    def kept(self, a: int, b: int = 1, *, more: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("same", "differs", "missing", "problem"),
    [
        (["kept"], {"moved": "how"}, {"gone": "why"}, []),
        (["kept", "moved"], {}, {"gone": "why"}, ["ours.moved takes other arguments: b: 'int' = 1"]),
        (["kept"], {}, {"gone": "why"}, ["theirs.moved is in no state"]),
        (["kept", "gone"], {"moved": "how"}, {}, ["ours has no gone"]),
        (["kept"], {"moved": "how", "kept": "how"}, {"gone": "why"}, ["theirs.kept is in two states"]),
        ([], {"moved": "how"}, {"gone": "why", "kept": "why"}, ["ours has kept, though it is said to be missing"]),
        (["kept", "new"], {"moved": "how"}, {"gone": "why"}, ["ours has no new", "theirs has no new"]),
    ],
)
def test_what_is_not_true_is_told(
    monkeypatch: pytest.MonkeyPatch,
    same: list[str],
    differs: dict[str, str],
    missing: dict[str, str],
    problem: list[str],
) -> None:
    monkeypatch.setattr(names, "find", {"theirs": Theirs, "ours": Ours}.__getitem__)
    assert names.problems(Part("theirs", "ours", same, differs, missing)) == problem


def test_names_that_a_module_only_imports_are_not_its_own() -> None:
    module = types.ModuleType("torch.distributed.rpc")
    own, foreign = type("Own", (), {"__module__": module.__name__}), type("Foreign", (), {"__module__": "elsewhere"})
    vars(module).update(own=own, foreign=foreign, sub=types, _private=own)
    assert names.public_names(module) == {"own"}
    vars(module)["__all__"] = ["foreign"]
    assert names.public_names(module) == {"own", "foreign"}


def test_a_document_without_a_place_for_it() -> None:
    with pytest.raises(ValueError, match="no place"):
        names.rewritten("no markers", PARTS)
