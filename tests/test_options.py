"""The options of ``init_rpc``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad.errors import UsageError
from telegrad.rpc import RpcBackendOptions, TensorPipeRpcBackendOptions
from telegrad.rpc.options import SECRET_VARIABLE, check_name


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
        ({"transports": ("ib",)}, r"transports must be of unix, tcp, not \['ib'\]"),
        ({"transports": ()}, "transports must be of unix, tcp"),
        ({"tls_key": "key.pem"}, "tls_certificate and tls_key go together"),
        ({"tls_certificate": "cert.pem"}, "tls_certificate and tls_key go together"),
    ],
)
def test_a_wrong_option_says_what_would_be_right(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RpcBackendOptions(**wrong)


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
