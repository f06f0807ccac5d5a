"""Imports point one way: a module imports only what stands above it in the list below.

Imports under ``if TYPE_CHECKING:`` do not count, for they do not run.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

# One line is one layer; modules of one layer do not import each other.  A new module needs a place in here.
LAYERS = [line.split() for line in """
    telegrad
    telegrad._text  telegrad._torch  telegrad.errors  telegrad._ids
    telegrad._wire
    telegrad._wire.messages
    telegrad._wire.aliasing  telegrad._wire.callables  telegrad._wire.codec  telegrad._wire.dtypes
    telegrad._wire.frames
    telegrad._wire.tensors  telegrad._wire.tree
    telegrad._wire.unpack_tensors
    telegrad._wire.pickles
    telegrad._wire.by_value  telegrad._wire.values
    telegrad._transport
    telegrad._transport.base  telegrad._transport.buffers  telegrad._transport.copier  telegrad._transport.handshake
    telegrad._transport.refusals  telegrad._transport.sockets
    telegrad._transport.shared_memory  telegrad._transport.tls
    telegrad._transport.admission  telegrad._transport.identity
    telegrad._transport.dial
    telegrad._transport.listener
    telegrad._current
    telegrad._core
    telegrad._core.interface  telegrad._core.python  telegrad._core.python.scheduler
    telegrad._core.python.pending
    telegrad._core.python.link
    telegrad._core.python.poller
    telegrad._core.python.timer
    telegrad._core.python.plane
    telegrad._agent
    telegrad._agent.failures  telegrad._agent.peers
    telegrad._agent.coroutines  telegrad._agent.futures  telegrad._agent.liveness  telegrad._agent.marshal
    telegrad._agent.calls
    telegrad._agent.agent
    telegrad._agent.barrier  telegrad._agent.dispatch
    telegrad._rref
    telegrad._rref.owner_counts
    telegrad._rref.ledger
    telegrad._rref.references
    telegrad._rref.rref
    telegrad.autograd.termination  telegrad.autograd.functions  telegrad.autograd.missing_context
    telegrad.autograd.context  telegrad.autograd.graph  telegrad.autograd.discovery
    telegrad.autograd.interceptors  telegrad.autograd.local_pass  telegrad.autograd.ddp
    telegrad.autograd.backward_pass
    telegrad.autograd.diagnostics  telegrad.autograd.accumulate
    telegrad.autograd.gates
    telegrad.autograd.run
    telegrad.autograd.passes  telegrad.autograd.context_end
    telegrad.autograd.handlers
    telegrad.autograd.engine
    telegrad.autograd.api
    telegrad.autograd
    telegrad._call_arguments
    telegrad._worker
    telegrad.rpc.calls  telegrad.rpc.functions  telegrad.rpc.options  telegrad.rpc.stores
    telegrad.rpc.foreign_rpc
    telegrad.rpc.records
    telegrad.rpc.rendezvous
    telegrad.rpc.network
    telegrad.rpc.joining
    telegrad.rpc.api
    telegrad.rpc
    telegrad.optim.fanout
    telegrad.optim.local
    telegrad.optim.clipping  telegrad.optim.distributed
    telegrad.optim
    telegrad.nn.parts  telegrad.nn.placement  telegrad.nn.unsupported
    telegrad.nn.remote_side
    telegrad.nn.remote_module
    telegrad.nn
    telegrad.checkpoint.files  telegrad.checkpoint.json_state
    telegrad.checkpoint.tensors
    telegrad.checkpoint.manifest
    telegrad.checkpoint.folder  telegrad.checkpoint.targets
    telegrad.checkpoint.stateful
    telegrad.checkpoint.fanout
    telegrad.checkpoint.loading  telegrad.checkpoint.saving
    telegrad.checkpoint
    telegrad.compat.children  telegrad.compat.graph_view  telegrad.compat.node_hooks  telegrad.compat.optim
    telegrad.compat.profiling
    telegrad.compat.error_texts
    telegrad.compat.futures
    telegrad.compat.rref
    telegrad.compat.worker
    telegrad.compat.nn  telegrad.compat.rpc.agent  telegrad.compat.rpc.constants  telegrad.compat.rpc.debugging
    telegrad.compat.rpc.functions  telegrad.compat.rpc.gather  telegrad.compat.rpc.internal  telegrad.compat.rpc._utils
    telegrad.compat.rpc.rref_proxy  telegrad.compat.rpc.server_process_global_profiler
    telegrad.compat.autograd  telegrad.compat.rpc.api  telegrad.compat.rpc.options
    telegrad.compat.rpc.backend_registry
    telegrad.compat.rpc.faulty  telegrad.compat.rpc.joining
    telegrad.compat.rpc
    telegrad.compat.rpc._testing
    telegrad.compat.installing
    telegrad.compat
    telegrad.compat.site.sitecustomize
    telegrad.launch.environment  telegrad.launch.lines  telegrad.launch.process
    telegrad.launch.local
    telegrad.launch
    telegrad.cli
    telegrad.testing.faults
    telegrad.testing.cluster
    telegrad.testing
    telegrad.__main__  telegrad.compat.__main__
""".splitlines() if line.strip()]  # fmt: skip
HEIGHT = {module: height for height, layer in enumerate(LAYERS) for module in layer}

MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SOURCE / "telegrad").rglob("*.py"))
}


def imports_of(tree: ast.Module, module: str, modules: set[str]) -> list[tuple[int, str]]:
    """The line and name of each module of telegrad that this one imports when it runs."""
    found = []
    for node in running(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} has a relative import"
            # `from package import name` imports a module if the package has one of that name.
            names = [
                whole if (whole := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names
            ]
        else:
            continue
        found += [(node.lineno, name) for name in dict.fromkeys(names) if name.split(".")[0] == "telegrad"]
    return found


def running(node: ast.AST):
    """All nodes but those that only a type checker sees."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body:
            continue
        yield from running(child)


def offences(tree: ast.Module, module: str) -> list[str]:
    return [
        f"{module}:{line} imports {name}, which does not stand above it"
        for line, name in imports_of(tree, module, set(MODULES))
        if HEIGHT.get(name, len(LAYERS)) >= HEIGHT[module]
    ]


def test_every_module_has_its_place():
    missing, gone = MODULES.keys() - HEIGHT.keys(), HEIGHT.keys() - MODULES.keys()
    assert not missing, f"give these a place in the order: {', '.join(sorted(missing))}"
    assert not gone, f"these are no modules any more: {', '.join(sorted(gone))}"


def test_no_module_stands_twice():
    assert sum(map(len, LAYERS)) == len(HEIGHT)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_stands_above_it(module):
    if module not in HEIGHT:
        pytest.skip("has no place yet; the test above says so")
    found = offences(ast.parse(MODULES[module].read_text()), module)
    assert not found, "\n".join(found)


# --- the test tests itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("from telegrad._agent.agent import Agent", "telegrad._agent.agent"),
        ("import telegrad._worker", "telegrad._worker"),
        ("from telegrad import rpc", "telegrad.rpc"),
        ("from telegrad._wire import values", "telegrad._wire.values"),
        ("def late():\n    from telegrad.cli import main", "telegrad.cli"),
        ("if x:\n    import telegrad._worker", "telegrad._worker"),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import telegrad.cli", "telegrad.cli"),
        ("import telegrad.no_such_module", "telegrad.no_such_module"),
    ],
)
def test_an_offence_is_named(code, named):
    (offence,) = offences(ast.parse(code), "telegrad._wire.codec")
    assert "telegrad._wire.codec:" in offence
    assert f"imports {named}, " in offence


@pytest.mark.parametrize(
    "code",
    [
        "import os, torch",
        "from telegrad.errors import ProtocolError",
        "from telegrad._wire.messages import Body",
        "from telegrad._wire import messages",
        "if TYPE_CHECKING:\n    from telegrad._worker import Worker",
        "if typing.TYPE_CHECKING:\n    from telegrad._worker import Worker",
    ],
)
def test_no_offence(code):
    assert offences(ast.parse(code), "telegrad._wire.codec") == []
