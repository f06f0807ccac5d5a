"""Which classes in the torch wheel are suites of tests."""

from __future__ import annotations

from typing import Literal, NamedTuple

Fixture = Literal["agent", "faulty", "none"]

_TORCH = "torch.testing._internal.distributed"


class Suite(NamedTuple):
    module: str
    class_name: str
    fixture: Fixture = "agent"
    """Which back end the tests start: the usual one, the one that loses messages, or none (not a suite of torch's)."""

    cuda: bool = False


SUITES = {
    "autograd": Suite(f"{_TORCH}.rpc.dist_autograd_test", "DistAutogradTest"),
    "autograd_sparse": Suite(f"{_TORCH}.rpc.dist_autograd_test", "TensorPipeAgentDistAutogradTest"),
    "optimizer": Suite(f"{_TORCH}.rpc.dist_optimizer_test", "DistOptimizerTest"),
    "parameter_server": Suite(f"{_TORCH}.rpc.examples.parameter_server_test", "ParameterServerTest"),
    "reinforcement": Suite(f"{_TORCH}.rpc.examples.reinforcement_learning_rpc_test", "ReinforcementLearningRpcTest"),
    "remote_module": Suite(f"{_TORCH}.nn.api.remote_module_test", "RemoteModuleTest"),
    "remote_module_3": Suite(f"{_TORCH}.nn.api.remote_module_test", "ThreeWorkersRemoteModuleTest"),
    "ddp": Suite(f"{_TORCH}.ddp_under_dist_autograd_test", "DdpUnderDistAutogradTest"),
    "ddp_comparison": Suite(f"{_TORCH}.ddp_under_dist_autograd_test", "DdpComparisonTest"),
    "rpc": Suite(f"{_TORCH}.rpc.rpc_test", "RpcTest"),
    "rpc_agent": Suite(f"{_TORCH}.rpc.rpc_test", "TensorPipeAgentRpcTest"),
    "faulty_autograd": Suite(f"{_TORCH}.rpc.dist_autograd_test", "FaultyAgentDistAutogradTest", "faulty"),
    "faulty_rpc": Suite(f"{_TORCH}.rpc.faulty_agent_rpc_test", "FaultyAgentRpcTest", "faulty"),
    "jit_rpc": Suite(f"{_TORCH}.rpc.jit.rpc_test", "JitRpcTest"),
    "jit_autograd": Suite(f"{_TORCH}.rpc.jit.dist_autograd_test", "JitDistAutogradTest"),
    "jit_faulty": Suite(f"{_TORCH}.rpc.jit.rpc_test_faulty", "JitFaultyAgentRpcTest", "faulty"),
    "cuda_rpc": Suite(f"{_TORCH}.rpc.rpc_test", "CudaRpcTest", cuda=True),
    "cuda_autograd": Suite(f"{_TORCH}.rpc.dist_autograd_test", "CudaDistAutogradTest", cuda=True),
    "cuda_remote_module": Suite(f"{_TORCH}.nn.api.remote_module_test", "CudaRemoteModuleTest", cuda=True),
    "cuda_ddp_comparison": Suite(f"{_TORCH}.ddp_under_dist_autograd_test", "CudaDdpComparisonTest", cuda=True),
    "cuda_rpc_agent": Suite(f"{_TORCH}.rpc.rpc_test", "TensorPipeAgentCudaRpcTest", cuda=True),
    "cuda_autograd_agent": Suite(f"{_TORCH}.rpc.dist_autograd_test", "TensorPipeCudaDistAutogradTest", cuda=True),
}
