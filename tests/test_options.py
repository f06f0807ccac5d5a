"""The options of ``init_rpc``."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.compat.rpc import TensorPipeRpcBackendOptions as CompatOptions
from telegrad.compat.rpc.backend_registry import BackendType, construct_rpc_backend_options
from telegrad.errors import UsageError
from telegrad.rpc import RpcBackendOptions, TensorPipeRpcBackendOptions
from telegrad.rpc import options as options_module
from telegrad.rpc.options import SECRET_VARIABLE, check_name, warn_of_short_secret, warn_of_unknown_variables


def test_the_defaults_are_torchs() -> None:
    options = RpcBackendOptions()
    assert (options.num_worker_threads, options.rpc_timeout, options.init_method) == (16, 60.0, "env://")
    assert options.device_maps == {}
    assert options.devices == []
    assert TensorPipeRpcBackendOptions is RpcBackendOptions


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_worker_threads": 0}, "num_worker_threads must be a positive number, not 0"),
        ({"num_worker_threads": 1.5}, "num_worker_threads must be a positive number"),
        ({"rpc_timeout": -1}, "rpc_timeout must be"),
        ({"rpc_timeout": "1"}, "rpc_timeout must be"),
        ({"init_timeout": -0.1}, "init_timeout must be"),
        ({"heartbeat": -1}, "heartbeat must be"),
        ({"heartbeat": 0}, "heartbeat must be more than 0 seconds"),
        ({"heartbeat": float("nan")}, "heartbeat must be"),
        ({"init_timeout": float("inf")}, "init_timeout must be"),
        ({"port": -1}, "port must be a number from 0 to 65535, not -1"),
        ({"port": 65536}, "port must be"),
        ({"port": "80"}, "port must be"),
        ({"transports": ("ib",)}, r"transports must be of unix, tcp, not \['ib'\]"),
        ({"transports": ()}, "transports must be of unix, tcp"),
        ({"tls_key": "key.pem"}, "tls_certificate, tls_key and tls_ca go together"),
        ({"tls_certificate": "cert.pem"}, "tls_certificate, tls_key and tls_ca go together"),
    ],
)
def test_a_wrong_option_says_what_would_be_right(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RpcBackendOptions(**wrong)


# --- from the environment ---------------------------------------------------------------------------------------------

VARIABLES = {
    "num_worker_threads": ("3", 3),
    "rpc_timeout": ("7.5", 7.5),
    "transports": ("tcp, unix", ("tcp", "unix")),
    "host": ("10.0.0.1", "10.0.0.1"),
    "port": ("4000", 4000),
    "tls_certificate": ("cert.pem", "cert.pem"),
    "tls_key": ("key.pem", "key.pem"),
    "tls_ca": ("ca.pem", "ca.pem"),
    "heartbeat": ("2", 2.0),
    "init_timeout": ("30", 30.0),
    "allow_pickle": ("0", False),
    "allow_cloudpickle": ("no", False),
}

KINDS: dict[str, Callable[[], RpcBackendOptions]] = {
    "telegrad": RpcBackendOptions,
    "compat": CompatOptions,
    "compat without options": lambda: construct_rpc_backend_options(BackendType["TENSORPIPE"]),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> None:
    for name, (text, _) in VARIABLES.items():
        monkeypatch.setenv(f"TELEGRAD_{name.upper()}", text)
    options = make()
    assert {name: getattr(options, name) for name in VARIABLES} == {
        name: value for name, (_, value) in VARIABLES.items()
    }


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (text, _) in VARIABLES.items():
        monkeypatch.setenv(f"TELEGRAD_{name.upper()}", text)
    given = {
        "num_worker_threads": 16,
        "rpc_timeout": 60.0,
        "transports": ("unix", "tcp"),
        "host": "10.0.0.2",
        "port": 0,
        "tls_certificate": "mine.pem",
        "tls_key": "my-key.pem",
        "tls_ca": "my-ca.pem",
        "heartbeat": 10.0,
        "init_timeout": 300.0,
        "allow_pickle": True,
        "allow_cloudpickle": True,
    }
    options = RpcBackendOptions(**given)  # type: ignore[arg-type]
    assert {name: getattr(options, name) for name in given} == given
    assert CompatOptions(rpc_timeout=60, num_worker_threads=16).rpc_timeout == 60
    assert construct_rpc_backend_options(BackendType["TENSORPIPE"], rpc_timeout=60).rpc_timeout == 60


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(f"TELEGRAD_{name.upper()}", " ")
    options, default = RpcBackendOptions(), {"host": None, "port": 0, "transports": ("unix", "tcp"), "heartbeat": 10.0}
    assert {name: getattr(options, name) for name in default} == default


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("TELEGRAD_NUM_WORKER_THREADS", "many", "TELEGRAD_NUM_WORKER_THREADS cannot be 'many'"),
        ("TELEGRAD_NUM_WORKER_THREADS", "0", "TELEGRAD_NUM_WORKER_THREADS cannot be '0'.*positive number"),
        ("TELEGRAD_RPC_TIMEOUT", "1 s", "TELEGRAD_RPC_TIMEOUT cannot be '1 s'"),
        ("TELEGRAD_RPC_TIMEOUT", "-1", "TELEGRAD_RPC_TIMEOUT cannot be '-1'.*number of seconds"),
        ("TELEGRAD_HEARTBEAT", "nan", "TELEGRAD_HEARTBEAT cannot be 'nan'.*number of seconds"),
        ("TELEGRAD_HEARTBEAT", "0", "TELEGRAD_HEARTBEAT cannot be '0'.*more than 0"),
        ("TELEGRAD_INIT_TIMEOUT", "soon", "TELEGRAD_INIT_TIMEOUT cannot be 'soon'"),
        ("TELEGRAD_PORT", "70000", "TELEGRAD_PORT cannot be '70000'.*from 0 to 65535"),
        ("TELEGRAD_TRANSPORTS", "unix,ib", r"TELEGRAD_TRANSPORTS cannot be 'unix,ib'.*unix, tcp, not"),
        ("TELEGRAD_ALLOW_PICKLE", "maybe", "TELEGRAD_ALLOW_PICKLE cannot be 'maybe': it must be 0 or 1"),
        ("TELEGRAD_ALLOW_CLOUDPICKLE", "2", "TELEGRAD_ALLOW_CLOUDPICKLE cannot be '2'"),
    ],
)
def test_a_malformed_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, message: str) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError, match=message):
        RpcBackendOptions()


def test_a_short_secret_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "telegrad.rpc"):
        warn_of_short_secret(None)
        warn_of_short_secret(b"x" * 16)
    assert caplog.text == ""
    warn_of_short_secret(b"x" * 15)
    assert "the secret has 15 characters only" in caplog.text
    assert "xx" not in caplog.text


# --- unknown variables ------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [each for each in os.environ if each.startswith("TELEGRAD_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(options_module, "_warned_of", set())


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("TELEGRAD_SECRTE", "Did you mean TELEGRAD_SECRET?"),
        ("TELEGRAD_TIMEOUT", "Did you mean TELEGRAD_RPC_TIMEOUT?"),
        ("TELEGRAD_num_workers_threads", "Did you mean TELEGRAD_NUM_WORKER_THREADS?"),
        ("TELEGRAD_XYZ", "Known are TELEGRAD_NUM_WORKER_THREADS, TELEGRAD_RPC_TIMEOUT, "),
    ],
)
def test_an_unknown_variable_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, variable: str, advice: str
) -> None:
    monkeypatch.setenv(variable, "hidden")
    for job in ("first", "second"):
        init_method = f"file://{tmp_path}/{job}"
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=RpcBackendOptions(init_method=init_method))
        rpc.shutdown()
    (warning,) = [record.getMessage() for record in caplog.records if "environment variable" in record.getMessage()]
    assert warning.startswith(f"the environment variable {variable} is ignored")
    assert advice in warning
    assert "hidden" not in warning


@pytest.mark.usefixtures("no_variables")
def test_the_variables_of_this_repository_are_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that the source reads, and those that the launcher, the tests and the benchmarks set."""
    files = [ROOT / "Makefile", *(ROOT / ".ci").glob("*")]
    for folder in ("src", "tests", "bench", "examples"):
        files += (file for file in (ROOT / folder).rglob("*.py") if file != Path(__file__))
    found = {name for file in files for name in re.findall(r"TELEGRAD_[A-Z_]*[A-Z]", file.read_text())}
    assert {"TELEGRAD_SECRET", "TELEGRAD_COMPAT", "TELEGRAD_FUZZ_EXAMPLES"} <= found
    for variable in found:
        monkeypatch.setenv(variable, "1")
    for name in VARIABLES:
        monkeypatch.setenv(f"TELEGRAD_{name.upper()}", "1")
    warn_of_unknown_variables()
    assert caplog.text == ""


# --- others -----------------------------------------------------------------------------------------------------------


def test_options_of_tensorpipe_are_taken_and_ignored() -> None:
    given = RpcBackendOptions(_transports=["shm", "uv"], _channels=["basic"])
    assert vars(given) == vars(RpcBackendOptions())


def test_device_maps() -> None:
    options = RpcBackendOptions(device_maps={"b": {"cuda:0": "cuda:1", "cpu": "cuda:2"}})
    options.set_device_map("b", {torch.device("cuda", 3): "cuda:0", "cuda:0": "cuda:1"})
    options.set_device_map("c", {"cpu": "cpu"})
    assert options.device_maps["b"] == {
        torch.device("cuda:0"): torch.device("cuda:1"),
        torch.device("cpu"): torch.device("cuda:2"),
        torch.device("cuda:3"): torch.device("cuda:0"),
    }
    assert options.device_maps["c"] == {torch.device("cpu"): torch.device("cpu")}
    with pytest.raises(UsageError, match=r"is already mapped to cuda:1 on worker 'b'"):
        options.set_device_map("b", {"cuda:0": "cuda:2"})
    with pytest.raises(RuntimeError):
        options.set_device_map("b", {"no such device": "cpu"})


def test_devices() -> None:
    options = RpcBackendOptions(devices=["cuda:1", "cpu"])
    assert options.devices == [torch.device("cuda:1"), torch.device("cpu")]
    options.set_devices([torch.device("cpu")])
    assert options.devices == [torch.device("cpu")]


def test_the_secret_comes_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert RpcBackendOptions().secret_bytes() is None
    monkeypatch.setenv(SECRET_VARIABLE, "from outside")
    assert RpcBackendOptions().secret_bytes() == b"from outside"
    assert RpcBackendOptions(secret="given").secret_bytes() == b"given"
    assert RpcBackendOptions(secret=b"\x00\xff").secret_bytes() == b"\x00\xff"
    assert RpcBackendOptions(secret="").secret_bytes() is None
    monkeypatch.setenv(SECRET_VARIABLE, "")
    assert RpcBackendOptions().secret_bytes() is None


def test_the_secret_is_not_shown() -> None:
    options = RpcBackendOptions(secret="hush", num_worker_threads=3)
    assert "hush" not in repr(options)
    assert "num_worker_threads=3" in repr(options)


@pytest.mark.parametrize("name", ["ps0", "trainer:1", "a-b_c", "x" * 127])
def test_a_good_name(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "a b", "ä", "a/b", "x" * 128, "a\n", 5, None])
def test_a_bad_name(name: Any) -> None:
    with pytest.raises(UsageError, match="letters, digits, '_', ':' and '-' only and fewer than 128"):
        check_name(name)
