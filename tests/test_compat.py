"""Programs for ``torch.distributed.rpc`` on telegrad: in which processes, and what is said where it cannot be.

That its functions do as torch's, PyTorch's own suites show (``tests/conformance``); here is what these do not ask.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import telegrad.rpc
from support import AT_ONCE, Gate, eventually, pass_through
from telegrad._agent import barrier
from telegrad.cli import main
from telegrad.compat import autograd, error_texts, nn, optim, rpc
from telegrad.compat.children import SITE, VARIABLE, adopt_children
from telegrad.compat.futures import Future, collect_all, wait_all
from telegrad.compat.rpc import gather
from telegrad.errors import (
    NotInitializedError,
    RendezvousError,
    RpcTimeoutError,
    SerializationError,
    UnknownWorkerError,
    UsageError,
)
from telegrad.launch import free_port
from telegrad.rpc import RpcBackendOptions, foreign_rpc
from telegrad.rpc.stores import JobStore
from worker_processes import PROGRAMS, clean_environment, run_python

SOURCE = Path(__file__).parent.parent / "src"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A job of one worker, which this process is."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store", rpc_timeout=10)
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    yield rpc
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown()


def double(value: Any) -> Any:
    return value * 2


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


# --- in all processes of a program ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["torch", "fork", "forkserver", "spawn"])
def test_a_program_and_its_children(how: str) -> None:
    done = run_python("-m", "telegrad", "compat", str(PROGRAMS / "compat.py"), how, str(free_port()))
    assert "sum 3 by telegrad.compat.rpc.api" in done.stdout, done.stderr
    assert "there telegrad.compat.rpc.api" in done.stdout
    assert done.returncode == 0


def test_a_program_under_torchrun() -> None:
    port = str(free_port())
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    done = run_python("-m", "telegrad.compat", *launcher, str(PROGRAMS / "compat.py"), "launched", port)
    assert "sum 3 by telegrad.compat.rpc.api" in done.stdout, done.stderr
    assert "there telegrad.compat.rpc.api" in done.stdout


def test_install_from_code_reaches_what_was_imported_before() -> None:
    code = (
        "import torch, os; from torch.distributed.rpc import rpc_sync, RRef; import torch.distributed.rpc as before\n"
        "import torch.distributed.autograd as dist_autograd; from torch.nn.parallel import DistributedDataParallel\n"
        "import telegrad.compat; telegrad.compat.install(); telegrad.compat.install()\n"
        "import torch.distributed.rpc.api, torch.distributed.rpc._testing, torch.distributed.rpc.internal\n"
        "assert rpc_sync.__module__ == RRef.__module__ + '' or rpc_sync.__module__.startswith('telegrad.'), rpc_sync\n"
        "assert before is torch.distributed.rpc and RRef is torch.distributed.rpc.RRef is before.api.RRef\n"
        "assert torch.nn.parallel.distributed.RRef is RRef\n"
        "assert dist_autograd.__name__ == 'telegrad.compat.autograd'\n"
        "assert torch.distributed.optim.DistributedOptimizer.__module__.startswith('telegrad.')\n"
        "assert torch.distributed.nn.RemoteModule.__module__.startswith('telegrad.')\n"
        f"assert os.environ[{VARIABLE!r}]\n"
        "print('in place')\n"
    )
    done = run_python("-c", code, PYTHONPATH=str(SOURCE))
    assert "in place" in done.stdout, done.stderr


WITHOUT_RPC = """
import torch
assert not any(hasattr(torch._C, name) for name in ("_rpc_init", "_distributed_rpc", "_distributed_autograd"))
try:
    import torch.distributed.rpc
except ModuleNotFoundError:
    raise SystemExit("no RPC")
import torch.distributed.rpc._testing, torch.distributed.optim, torch.distributed.nn
from torch.distributed import autograd, rpc
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim.optimizer import DistributedOptimizer
from torch.distributed.rpc import RRef, internal, rref_proxy
assert RRef is torch.distributed.rpc.api.RRef
assert torch.distributed.nn.RemoteModule is RemoteModule
assert torch.distributed.optim.DistributedOptimizer is DistributedOptimizer
assert hasattr(torch.distributed.optim, "ZeroRedundancyOptimizer")
assert hasattr(torch.distributed.nn, "all_reduce")
print("RPC of", rpc.__name__)
"""


def test_names_on_a_torch_without_rpc(tmp_path: Path) -> None:
    """torch may drop its RPC: what programs import from it is there all the same."""
    without = str(PROGRAMS / "torch_without_rpc")
    (tmp_path / "probe.py").write_text(WITHOUT_RPC)
    probe = [str(tmp_path / "probe.py")]
    assert run_python(*probe, PYTHONPATH=without).stderr.endswith("no RPC\n")
    done = run_python("-m", "telegrad", "compat", *probe, PYTHONPATH=without)
    assert done.stdout == "RPC of telegrad.compat.rpc\n", done.stderr


def test_a_program_on_a_torch_without_rpc() -> None:
    without = str(PROGRAMS / "torch_without_rpc")
    program = [str(PROGRAMS / "compat.py"), "fork", str(free_port())]
    done = run_python("-m", "telegrad", "compat", *program, PYTHONPATH=without)
    assert "sum 3 by telegrad.compat.rpc.api" in done.stdout, done.stderr
    assert "there telegrad.compat.rpc.api" in done.stdout
    assert done.returncode == 0


def test_install_is_refused_while_torchs_rpc_runs(tmp_path: Path) -> None:
    code = (
        "import torch.distributed.rpc as rpc, telegrad.compat\n"
        f"options = rpc.TensorPipeRpcBackendOptions(init_method='file://{tmp_path}/store')\n"
        "rpc.init_rpc('alone', rank=0, world_size=1, rpc_backend_options=options)\n"
        "try:\n    telegrad.compat.install()\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
        "rpc.shutdown()\n"
    )
    done = run_python("-c", code, PYTHONPATH=str(SOURCE))
    assert "UsageError torch's own RPC is running in this process" in done.stdout, done.stderr
    assert "before init_rpc" in done.stdout


def test_a_process_without_torch_stays_without_it_and_runs_its_own_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    adopt_children(environment)
    adopt_children(environment)
    assert environment["PYTHONPATH"].split(os.pathsep) == [SITE, str(tmp_path)]
    code = "import sys; print('torch' in sys.modules, any(p.endswith('compat/site') for p in sys.path))"
    done = run_python("-c", code, **environment)
    assert done.stdout.split("\n")[:2] == ["the other one", "False False"], done.stderr


@pytest.mark.parametrize("before", ["/x", "/x:", ":/x", ""])
def test_the_path_of_modules_stays_as_it_was(before: str) -> None:
    environment = {"PYTHONPATH": before}
    adopt_children(environment)
    assert environment["PYTHONPATH"] == (f"{SITE}:{before}" if before else SITE)


def test_a_look_for_torch_before_its_import_changes_nothing(tmp_path: Path) -> None:
    program = tmp_path / "probe.py"
    program.write_text(
        "import importlib.util\nassert importlib.util.find_spec('torch')\nassert importlib.util.find_spec('torch')\n"
        "import torch.distributed.rpc as rpc\nprint(rpc.__name__)\n"
    )
    done = run_python("-m", "telegrad", "compat", str(program))
    assert done.stdout == "telegrad.compat.rpc\n", done.stderr


DYING = """
import os, signal, sys, time
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

def work(rank):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=3)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    rpc.shutdown()
    os.write(1, b"left\\n")

if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    workers = [mp.get_context("spawn").Process(target=work, args=(rank,)) for rank in range(3)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(50)
        each.kill()
"""


def test_a_graceful_shutdown_goes_on_without_a_worker_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    done = run_python("-m", "telegrad", "compat", str(tmp_path / "dying.py"), str(free_port()))
    assert done.stdout == "left\nleft\n", done.stdout + done.stderr


def test_a_step_without_gradients_does_nothing(alone: Any) -> None:
    parameter = torch.ones(2, requires_grad=True)
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, [rpc.RRef(parameter)], lr=1.0)
    with autograd.context() as context_id:
        optimizer.step(context_id)
    assert parameter.tolist() == [1.0, 1.0]
    del optimizer


def test_the_command_names_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", "no_such_program.py"]) == 2
    assert "there is no script 'no_such_program.py'" in capsys.readouterr().err


def test_the_exit_code_is_the_programs_own(tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text("import sys; sys.exit(int(sys.argv[1]))\n")
    assert run_python("-m", "telegrad.compat", str(tmp_path / "leave.py"), "7").returncode == 7


# --- what cannot be -------------------------------------------------------------------------------------------------


def test_device_maps_without_cuda(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    with pytest.raises(UsageError, match=r"0 is no device on this machine: .*leave it out"):
        options.set_device_map("other", {0: 0})
    options.set_device_map("other", {"cuda:0": "cuda:0"})
    with pytest.raises(ValueError, match=r"device map for other: cuda:0, and this machine has no CUDA devices.*leave"):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    assert not rpc._is_current_rpc_agent_set()


@pytest.mark.parametrize("call", ["rpc_sync", "rpc_async", "remote"])
def test_torchscript_is_refused_with_the_way_out(alone: Any, call: str) -> None:
    with pytest.warns(DeprecationWarning, match=r"torch\.jit\.script"):
        scripted = torch.jit.script(_script_me)
    with pytest.raises(UsageError, match=r"'_script_me' is a TorchScript function.*take @torch.jit.script off"):
        getattr(alone, call)("alone", scripted, (torch.ones(1),))


def _script_me(x):  # type: ignore[no-untyped-def]
    return x + 1


def test_what_has_no_stand_in_says_so(alone: Any) -> None:
    with pytest.raises(UsageError, match=r"_server_process_global_profile.*use torch.profiler.profile"):
        alone._server_process_global_profile()
    with pytest.raises(UsageError, match=r"cannot carry telegrad's calls.*BackendType.TENSORPIPE"):
        alone.api._set_and_start_rpc_agent(object())
    with pytest.raises(AttributeError, match=r"stands in for torch.distributed.rpc, has no '_invoke_rpc_torchscript'"):
        _ = alone._invoke_rpc_torchscript


# --- a job of both kinds --------------------------------------------------------------------------------------------

MIXED = """
import sys, torch
kind, rank, where = sys.argv[1:]
if kind == "torch":
    import torch.distributed.rpc as rpc
else:
    from telegrad import rpc
options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=15, init_method=where)
rpc.init_rpc(f"worker{rank}", rank=int(rank), world_size=2, rpc_backend_options=options)
"""


@pytest.mark.parametrize(("ours", "theirs"), [(0, 1), (1, 0)])
def test_a_worker_of_torch_in_the_same_job_is_noticed(ours: int, theirs: int) -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", MIXED]
    environment = {**clean_environment(), "PYTHONPATH": str(SOURCE)}
    other = subprocess.Popen([*command, "torch", str(theirs), where], env=environment, stderr=subprocess.DEVNULL)
    try:
        done = run_python("-c", MIXED, "telegrad", str(ours), where, PYTHONPATH=str(SOURCE), timeout=40)
    finally:
        other.kill()
        other.wait()
    assert f"rank {theirs} runs torch's own RPC" in done.stderr, done.stderr
    assert "telegrad compat" in done.stderr


def test_marks_of_torch_count_only_after_a_while_and_of_missing_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(foreign_rpc.time, "monotonic", lambda: now[0])
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    knocks: list[None] = []
    looking = foreign_rpc.TorchWorkers(JobStore(store), lambda: knocks.append(None))
    store.set("rpc_prefix_0/0/1", "gloo was here")
    for now[0] in (100.1, 101.0, 102.0):
        looking.check([1])
    now[0] = 110.0
    looking.check([0])  # rank 1 has come
    assert len(knocks) == 1
    now[0] = 120.0
    with pytest.raises(RendezvousError, match="rank 1 runs torch's own RPC"):
        looking.check([1])


def test_a_worker_with_a_world_size_and_one_without(tmp_path: Path) -> None:
    """The second in a thread of its own: ``init_rpc`` of the first waits for it."""
    where = f"file://{tmp_path}/store"
    code = (
        "import sys; from telegrad import rpc\n"
        f"options = rpc.RpcBackendOptions(init_method={where!r}, init_timeout=20)\n"
        "rpc.init_rpc('b', rank=1, rpc_backend_options=options)\n"
    )
    store = torch.distributed.PrefixStore("telegrad/0/0", torch.distributed.FileStore(f"{tmp_path}/store", -1))
    store.set("size", "closed")
    done = run_python("-c", code, PYTHONPATH=str(SOURCE))
    assert "other workers of this job were given a world size, and this one none" in done.stderr


# --- torch's words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NotInitializedError("RPC is not running"), "RPC has not been initialized"),
        (RpcTimeoutError("f on worker 'a' got no answer within 0.1 s."), "RPC ran for more than set timeout (0.1 s)"),
        (UnknownWorkerError("no worker 'x' in this job; it has a"), "could not find destination 'x'"),
        (RendezvousError("the name 'a' is already taken by rank 0"), "RPC worker name 'a' is not unique"),
        (SerializationError("module 'm' (f) has no 'g'"), "Default RPC pickler does not serialize function code"),
        (UsageError("no context 7 here: worker"), "Could not find autograd context with id: 7"),
    ],
)
def test_an_error_has_torchs_words_and_its_own(error: Exception, text: str) -> None:
    new = error_texts.translated(error)
    assert type(new) is type(error)
    assert str(new).startswith(text)
    assert str(error) in str(new)
    assert error_texts.translated(new) is new


def test_an_error_without_words_stays_as_it_is() -> None:
    error = ValueError("of the user's own")
    assert error_texts.translated(error) is error


def test_errors_of_the_worker_itself(alone: Any) -> None:
    with pytest.raises(RuntimeError, match=r"^could not find destination 'nobody'"):
        alone.rpc_sync("nobody", double, (1,))
    with pytest.raises(RuntimeError, match=r"^RPC ran for more than"):
        alone.rpc_sync("alone", sleep, (1.0,), timeout=0.05)
    with pytest.raises(RuntimeError, match=r"^RPC is already initialized"):
        alone.init_rpc("again", rank=0, world_size=1)
    with pytest.raises(RuntimeError, match=r"^Could not find autograd context with id: 5\b"):
        autograd.get_gradients(5)
    alone.shutdown()
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        alone.rpc_sync("alone", double, (1,))


def test_telegrads_own_options_are_taken_too(tmp_path: Path) -> None:
    options = RpcBackendOptions(init_method=f"file://{tmp_path}/store", heartbeat=3)
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        assert telegrad.rpc.rpc_sync("alone", double, (2,)) == rpc.rpc_sync("alone", double, (2,)) == 4
        assert isinstance(rpc.remote("alone", double, (2,)), rpc.RRef)
    finally:
        rpc.shutdown()


# --- futures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collect", [wait_all, lambda futures: collect_all(futures).wait()])
def test_the_first_error_ends_the_wait(collect: Any) -> None:
    never, broken = Future(), Future()
    threading.Timer(0.05, broken.set_exception, (KeyError("first"),)).start()
    begun = time.monotonic()
    with pytest.raises(KeyError, match="first"):
        collect([never, broken])
    assert time.monotonic() - begun < AT_ONCE


def test_all_values_come_in_the_order_of_the_futures() -> None:
    futures = [Future() for _ in range(3)]
    for index in (2, 0, 1):
        futures[index].set_result(index)
    assert wait_all(futures) == [0, 1, 2]
    assert collect_all(futures).wait() == futures
    assert wait_all([]) == []


def test_what_a_callback_raises_is_a_runtime_error() -> None:
    future = Future()
    after = future.then(lambda _: [][1])
    future.set_result(None)
    with pytest.raises(RuntimeError, match="IndexError: list index out of range"):
        after.wait()
    with pytest.raises(TypeError, match="incompatible function arguments"):
        future.then(None)  # type: ignore[arg-type]


# --- gatherings -----------------------------------------------------------------------------------------------------


def test_a_gathering_ends_when_all_have_come_and_the_next_has_another_number() -> None:
    gatherings = gather.Gatherings()
    key, state = gatherings.begin({"a", "b"})
    gatherings.add(key, "b", 2, {"a", "b"})
    assert not state.proceed_signal.is_set()
    gatherings.add(key, "a", 1, {"a", "b"})
    assert state.proceed_signal.is_set()
    assert state.gathered_objects == {"b": 2, "a": 1}
    with pytest.raises(RuntimeError, match="a reported intent sequence id ab0 twice"):
        gatherings.add(key, "a", 1, {"a", "b"})
    assert gatherings.begin({"b", "a"})[0] == "ab1"


def test_a_gathering_that_takes_long_says_for_whom_it_waits(
    alone: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A graceful shutdown begins with one."""
    monkeypatch.setattr(barrier, "NOTICE_SECONDS", 0.05)
    with pytest.raises(RpcTimeoutError, match="_all_gather waited 1 s"):
        alone.api._all_gather(None, {"alone", "late"}, timeout=1)
    assert any("worker 'alone': shutdown or _all_gather has waited" in said for said in caplog.messages)
    assert any(said.endswith("s for late to call it too") for said in caplog.messages)


# --- references, contexts, modules ----------------------------------------------------------------------------------


def test_a_reference_shows_itself_as_torchs(alone: Any) -> None:
    rref = alone.RRef(5)
    assert str(rref) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
    assert rref._get_type() is int
    with pytest.raises(AttributeError, match="has no attribute 'no_such'"):
        rref.remote().no_such()
    with pytest.raises(RuntimeError, match="Can not pickle rref"):
        pickle.dumps(rref)


def test_methods_as_functions_and_references_as_tuples() -> None:
    done = run_python("-m", "telegrad", "compat", str(PROGRAMS / "compat_references.py"), str(free_port()))
    assert "methods as functions" in done.stdout, done.stderr
    assert "references as tuples" in done.stdout, done.stderr
    assert done.stdout.count("left") == 3, done.stderr
    assert done.returncode == 0


def test_a_tuple_holds_its_reference_until_it_is_claimed(alone: Any) -> None:
    fork = alone.RRef(5)._serialize()
    assert (fork[0], *fork[5:]) == (0, 0, "PyObject")
    rref = alone.PyRRef._deserialize(fork)
    assert isinstance(rref, alone.RRef)
    assert rref.to_here() == 5
    with pytest.raises(UsageError, match=r"worker 'alone' holds no serialized RRef .*deserialized once"):
        alone.PyRRef._deserialize(fork)


def test_names_that_torchs_module_leaves_behind(alone: Any) -> None:
    theirs = importlib.import_module("torch.distributed.rpc.api")
    names = ["docstring", "method", "method_factory", "method_name", "new_method"]
    assert all(hasattr(theirs, name) for name in names)
    assert alone.api.method_name == theirs.method_name == "to_here"
    assert alone.api.new_method(alone.RRef(5)) == 5
    assert set(theirs.__all__) == set(alone.api.__all__)


def test_the_agents_metrics_have_torchs_keys(alone: Any) -> None:
    agent = alone._get_current_rpc_agent()
    quiet = {
        "agent.client_active_calls": "0",
        "agent.num_idle_threads": "16",
        "agent.server_active_async_calls": "0",
        "agent.server_active_calls": "0",
        "agent.thread_pool_size": "16",
    }
    assert eventually(lambda: agent.get_metrics() == quiet), agent.get_metrics()
    gate, future = Gate(), torch.futures.Future()
    _awaited.append(future)
    running = alone.rpc_async("alone", pass_through, (gate,))
    waiting = alone.rpc_async("alone", _wait_for_it)
    busy = {
        "agent.client_active_calls": "2",
        "agent.num_idle_threads": "15",
        "agent.server_active_async_calls": "1",
        "agent.server_active_calls": "2",
        "agent.thread_pool_size": "16",
    }
    assert eventually(lambda: agent.get_metrics() == busy), agent.get_metrics()
    gate.open()
    future.set_result(3)
    running.wait()
    assert waiting.wait() == 3
    assert eventually(lambda: agent.get_metrics() == quiet), agent.get_metrics()
    assert quiet.keys() <= agent.get_debug_info().keys()


_awaited: list[Any] = []


@rpc.functions.async_execution
def _wait_for_it() -> Any:
    return _awaited.pop()


def test_a_context_shows_its_graph_as_torchs(alone: Any) -> None:
    one, two = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        result = alone.rpc_sync("alone", torch.add, (one, two))
        context = autograd._current_context()
        assert context._context_id() == context_id
        sends, recvs = context._send_functions(), context._recv_functions()
        assert [len(send.next_functions) for send in sends.values()] == [2, 1]
        assert result.grad_fn == list(recvs.values())[1]
        add = list(sends.values())[1].next_functions[0][0]
        (left, _), (right, _) = add.next_functions
        assert left == right
        assert left.name() == "torch::distributed::autograd::RecvRpcBackward"
        autograd.backward(context_id, [result.sum()])
        assert set(autograd.get_gradients(context_id)) == {one, two}
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        autograd._retrieve_context(context_id)


def test_handles_that_are_given_up_are_not_dropped_again(alone: Any) -> None:
    rref = alone.remote("alone", double, (3,))
    assert rref.to_here() == 6
    alone.api._delete_all_user_and_unforked_owner_rrefs()
    del rref
    assert eventually(lambda: telegrad.rpc.debug_info()["references"]["user_forks"] == 0)


def test_a_remote_module_refuses_in_torchs_words_and_says_what_to_do(alone: Any) -> None:
    layer = nn.RemoteModule("alone/cpu", torch.nn.Linear, (2, 1))
    with pytest.raises(ValueError, match=r"Method ``cuda`` not supported for RemoteModule. .*remote_device"):
        layer.cuda()
    with pytest.raises(ValueError, match=r"``state_dict`` not supported.*telegrad.nn.RemoteModule has"):
        layer.state_dict()
    assert layer(torch.ones(1, 2)).shape == (1, 1)
    sent = alone.rpc_sync("alone", _call_it, (layer,))
    assert sent.shape == (1, 1)


def _call_it(layer: Any) -> torch.Tensor:
    assert tuple(vars(layer))[:6] == nn._REMOTE_MODULE_PICKLED_ATTRIBUTES
    return layer(torch.ones(1, 2))  # type: ignore[no-any-return]
