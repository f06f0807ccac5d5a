"""With this directory on PYTHONPATH, torch is as if RPC and what needs it had been deleted from it.

The modules cannot be imported, the functions that start their C++ part are gone, and the modules of torch that import
RPC or ask whether it is available are edited as they are loaded.
"""

import importlib.abc
import importlib.machinery
import sys

GONE = (
    "torch._C._distributed_autograd",
    "torch._C._distributed_rpc",
    "torch.distributed.autograd",
    "torch.distributed.nn.api",
    "torch.distributed.nn.jit",
    "torch.distributed.optim.optimizer",
    "torch.distributed.rpc",
)
IN_CPP = ("_dist_autograd_init", "_faulty_agent_init", "_rpc_init")
EDITED = (
    "torch._jit_internal",
    "torch.distributed.nn",
    "torch.jit._builtins",
    "torch.jit.annotations",
    "torch.nn.parallel.distributed",
)
EDITS = {
    "import torch.distributed.rpc\n": "",
    "    import torch.distributed.autograd as dist_autograd\n": "",
    "if dist_autograd.is_available()": "if False",
    "torch.distributed.rpc.is_available()": "False",
    "dist.rpc.is_available()": "False",
}


class WithoutRpc(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            for each in IN_CPP:
                delattr(sys.modules["torch._C"], each)
        package = sys.modules.get(name.rpartition(".")[0])
        is_torchs = package is not None and package.__name__.startswith("torch")  # and not what took its place
        if is_torchs and any(name == gone or name.startswith(gone + ".") for gone in GONE):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name not in EDITED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Edited(name, spec.origin)
        return spec


class Edited(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        source = self.get_source(fullname)
        for before, after in EDITS.items():
            source = source.replace(before, after)
        return self.source_to_code(source, self.path)


sys.meta_path.insert(0, WithoutRpc())
