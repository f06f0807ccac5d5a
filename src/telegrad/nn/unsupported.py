"""Methods of ``nn.Module`` that have no meaning for a module on another worker, and what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from telegrad.errors import UsageError

_THERE = "let worker {on!r} do it: rpc_sync({on!r}, function, (remote.get_module_rref(),))"
_BUILT = "the parts of the module are made on worker {on!r}: change them in the constructor of its class"
_PLACED = "it stays where the constructor put it: make another one with remote_device='{on}/...'"
_PARAMETERS = "they are on worker {on!r}: take remote_parameters(), which gives an RRef to each"
_HOOK = "a hook runs where its tensors are; " + _THERE
_PARTS = "its parts are on worker {on!r}: give a function that looks at them to rpc_sync, with get_module_rref()"
_COPY = "for a second handle on the same module: RemoteModule.init_from_module_rref(place, remote.get_module_rref())"

INSTEAD = {
    **dict.fromkeys(("register_buffer", "register_parameter", "add_module", "register_module"), _BUILT),
    **dict.fromkeys(("cuda", "ipu", "xpu", "mtia", "cpu", "to", "to_empty"), _PLACED),
    **dict.fromkeys(("apply", "type", "float", "double", "half", "bfloat16", "requires_grad_"), _THERE),
    **dict.fromkeys(("register_forward_pre_hook", "register_forward_hook", "register_backward_hook"), _HOOK),
    **dict.fromkeys(("register_full_backward_hook", "register_full_backward_pre_hook"), _HOOK),
    **dict.fromkeys(("register_state_dict_pre_hook", "register_state_dict_post_hook"), _HOOK),
    **dict.fromkeys(("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"), _HOOK),
    **dict.fromkeys(("parameters", "named_parameters", "get_parameter"), _PARAMETERS),
    **dict.fromkeys(("buffers", "named_buffers", "get_buffer"), "they are on worker {on!r}: state_dict() has copies"),
    **dict.fromkeys(("children", "named_children", "modules", "named_modules", "get_submodule"), _PARTS),
    **dict.fromkeys(("__copy__", "__deepcopy__"), _COPY),
    "set_submodule": _BUILT,
    "zero_grad": "the gradients are in a context, and each context has its own: there is nothing to zero",
    "share_memory": "it is on worker {on!r}: send this RemoteModule, or get_module_rref(), to the workers that use it",
    "extra_repr": "repr() shows the class, the worker and the device; " + _THERE,
}


def refuse(remote: Any, name: str) -> NoReturn:
    raise UsageError(f"a RemoteModule has no {name}(): {INSTEAD[name].format(on=remote.on)}")


def _refusal(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(self, name)

    method.__name__ = name
    return method


class Refusals:
    """Comes before ``nn.Module`` among the base classes."""


for _name in INSTEAD:
    setattr(Refusals, _name, _refusal(_name))
