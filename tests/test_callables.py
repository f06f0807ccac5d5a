"""Callables by name: what has one, what it resolves to, and what the error says when it does not."""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import operator
import sys
import threading
import types

import pytest
import torch

import support
from support import Gate, in_thread
from telegrad._wire import callables
from telegrad._wire.callables import exception_type, export, exported_method, name_of, resolve
from telegrad.errors import SerializationError, UsageError, WorkerLostError


@pytest.fixture(autouse=True)
def _own_exports(monkeypatch):
    """What a test exports is gone after it."""
    monkeypatch.setattr(callables, "_exported", dict(callables._exported))
    monkeypatch.setattr(callables, "_names", dict(callables._names))
    monkeypatch.setattr(callables, "_exported_methods", dict(callables._exported_methods))


def plain(x):
    return x


class Model(torch.nn.Module):
    class Inner:
        @staticmethod
        def deep():
            return "deep"

    @staticmethod
    def static():
        return "static"

    @classmethod
    def by_class(cls):
        return cls

    def method(self):
        return self

    def add(self):
        """Has the name of one of torch's operators."""


class Child(Model):
    pass


class Unhashable:
    __hash__ = None

    def __call__(self):
        return 1


# --- names that lead back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (plain, f"{__name__}:plain"),
        (Model, f"{__name__}:Model"),
        (Model.static, f"{__name__}:Model.static"),
        (Model.method, f"{__name__}:Model.method"),
        (Model.Inner.deep, f"{__name__}:Model.Inner.deep"),
        (math.sqrt, "math:sqrt"),
        (print, "builtins:print"),
        (dict, "builtins:dict"),
        (operator.add, "_operator:add"),
        (torch.add, "torch:add"),
        (torch.matmul, "torch:matmul"),
        (torch.ones, "torch:ones"),
        (torch.einsum, "torch.functional:einsum"),
        (torch.nn.functional.relu, "torch.nn.functional:relu"),
        (torch.nn.Linear, "torch.nn.modules.linear:Linear"),
        (torch.optim.SGD, "torch.optim.sgd:SGD"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_name_leads_back_to_the_same_object(function, name):
    assert name_of(function) == name
    assert name_of(function) == name  # now remembered
    assert resolve(name, True) is function


@pytest.mark.parametrize("function", [torch.nn.functional.conv2d, torch.nn.functional.gelu, torch.Tensor.add])
def test_builtin_operators_have_a_name_somewhere(function):
    assert resolve(name_of(function), True) is function


@pytest.mark.parametrize("method", [torch.Tensor.add, torch.Tensor.add_, torch.Tensor.backward, torch.Tensor.split])
def test_methods_of_tensors(method):
    name = name_of(method)
    assert name is not None
    assert resolve(name, True) == method


def test_a_class_method_is_bound_to_its_class():
    assert resolve(name_of(Model.by_class), True)() is Model


def test_an_inherited_class_method_is_not_sent_as_its_parents():
    """Its qualified name says Model, and Model.by_class is bound to another class."""
    assert name_of(Child.by_class) is None


def test_a_name_is_its_own_name():
    assert name_of("forward") == "forward"


def test_the_main_module_has_one_name(monkeypatch):
    main = type(sys)("__mp_main__")
    exec("def job(): pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert name_of(main.job) == "__main__:job"
    assert resolve("__main__:job", True) is main.job


# --- what can only go by value --------------------------------------------------------------------------------------


def nested():
    def inner():
        pass

    return inner


@pytest.mark.parametrize(
    "function",
    [
        lambda: 1,
        nested(),
        functools.partial(plain, 1),
        Model().method,
        Model().add,
        torch.ones(2).add,
        [].append,
        Model(),
        Unhashable(),
    ],
    ids=lambda function: type(function).__name__,
)
def test_no_name(function):
    assert name_of(function) is None


def test_a_function_that_another_hides_has_no_name():
    hidden = type(plain)(plain.__code__, globals(), "plain")
    assert hidden.__qualname__ == "plain"
    assert name_of(hidden) is None


# --- errors ---------------------------------------------------------------------------------------------------------


def test_a_missing_module_is_named():
    with pytest.raises(SerializationError, match=r"cannot import module 'no_such_module' for 'f'"):
        resolve("no_such_module:f", True)


@pytest.mark.parametrize("path", ["no_such_function", "path.no_such_function", ""])
def test_a_missing_attribute_is_named(path):
    with pytest.raises(SerializationError, match=rf"module 'os' \(.*os.py\) has no '{path}'"):
        resolve(f"os:{path}", True)


def test_a_name_that_nobody_exported():
    with pytest.raises(SerializationError, match="no function is exported as 'forward'"):
        resolve("forward", True)


@pytest.mark.parametrize("name", [":f", ".relative:f", "..:f", "a b:f", "a\0b:f", "\ud800:f"])
def test_a_name_that_can_be_no_module(name):
    with pytest.raises(SerializationError, match="cannot import module"):
        resolve(name, True)


def test_a_module_that_raises_while_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SerializationError, match=r"broken_module.*ZeroDivisionError"):
        resolve("broken_module:f", True)


# --- exports, and nothing else --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["early", "late"])
def test_a_module_that_another_thread_is_importing_is_waited_for(tmp_path, monkeypatch, name):
    """Two workers whose first calls need it come at once."""
    (tmp_path / f"slow_for_{name}.py").write_text(
        "import support\n"
        "def early():\n    return TABLE\n"
        "support.importing.pass_through()\n"
        "TABLE = 7\n"
        "def late():\n    return TABLE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(support, "importing", gate := Gate(), raising=False)
    first = in_thread(lambda: resolve(f"slow_for_{name}:{name}", allow_any=True)())
    gate.wait_entered()
    second = in_thread(lambda: resolve(f"slow_for_{name}:{name}", allow_any=True)())
    assert not gate.opened.wait(0.05)  # time enough for the second to look
    gate.open()
    assert first() == second() == 7


def test_a_function_that_stands_further_down_in_the_main_program_is_waited_for(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    found = in_thread(lambda: resolve("__main__:further_down", allow_any=True))
    assert not threading.Event().wait(0.02)
    main.further_down = len
    assert found() is len
    monkeypatch.setattr(callables, "_MAIN_SECONDS", 0.01)
    with pytest.raises(SerializationError, match="has no 'nowhere'"):
        resolve("__main__:nowhere", allow_any=True)


def test_export_by_its_own_name():
    assert export(plain) is plain
    assert resolve(f"{__name__}:plain", False) is plain


def test_export_by_a_short_name():
    assert export(name="forward")(plain) is plain
    assert name_of(plain) == "forward"
    assert resolve("forward", False) is plain
    assert resolve("forward", True) is plain


def test_a_local_function_can_be_exported():
    inner = export(nested())
    assert resolve(name_of(inner), False) is inner


def test_one_short_name_means_one_function():
    export(name="forward")(plain)
    export(name="forward")(plain)
    with pytest.raises(UsageError, match="'forward'"):
        export(name="forward")(nested())


def test_a_reloaded_module_may_export_again():
    first, second = nested(), nested()
    export(first)
    export(second)
    assert resolve(name_of(second), False) is second


def test_an_exported_name_outlives_the_memory_for_names(monkeypatch):
    monkeypatch.setattr(callables, "_NAMES_KEPT", len(callables._names) + 2)
    export(name="forward")(plain)
    for function in (math.sin, math.cos, math.tan, math.exp):
        name_of(function)
    assert len(callables._names) <= callables._NAMES_KEPT
    assert name_of(plain) == "forward"


@pytest.mark.parametrize(
    "name", ["os:system", "builtins:eval", f"{__name__}:plain", "torch:load", "torch:hub.load", "torch:", "x", ""]
)
def test_without_allow_any_nothing_else_is_found(name):
    with pytest.raises(SerializationError, match=r"is not exported here.*rpc.export"):
        resolve(name, False)


def test_without_allow_any_nothing_is_imported(tmp_path, monkeypatch):
    (tmp_path / "canary_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SerializationError):
        resolve("canary_module:f", False)
    assert "canary_module" not in sys.modules


@pytest.mark.parametrize("path", sorted(callables._PLAIN_OPERATORS))
def test_torchs_plain_operators_are_always_there(path):
    found = resolve(f"torch:{path}", False)
    assert found.__wrapped__ is getattr(torch, path)
    assert found is resolve(f"torch:{path}", False)


@pytest.mark.parametrize("path", sorted(callables._PLAIN_OPERATORS))
def test_torchs_plain_operators_write_into_no_argument(path):
    operator = resolve(f"torch:{path}", False)
    with pytest.raises(SerializationError, match=rf"torch.{path} takes no out="):
        operator(torch.ones(2, 2), torch.ones(2, 2), out=torch.zeros(2, 2))
    for count in range(1, 6):  # nor by position
        for kind in (torch.zeros, lambda *shape: [torch.zeros(*shape)]):
            given = [kind(2, 2), *(torch.full((2, 2), 7.0) for _ in range(count))]
            with contextlib.suppress(TypeError, RuntimeError):
                operator(*given)
            assert all((one == 7).all() for one in given[1:])


@pytest.mark.parametrize("name", sorted(callables._PLAIN_METHODS))
def test_plain_methods_of_tensors_write_into_no_argument(name):
    value, target = torch.ones(2, 2), torch.full((2, 2), 7.0)
    if not hasattr(value, name):
        return
    with pytest.raises(TypeError):
        exported_method(value, name)(value, out=target)
    assert (target == 7).all()


def quantised():
    return torch.quantize_per_tensor(torch.rand(8, 4), 0.1, 0, torch.quint8)


UNUSUAL = {
    "quantised": quantised,
    "sparse": lambda: torch.ones(2, 2).to_sparse(),
    "sparse, of a size that torch cannot multiply": lambda: torch.sparse_coo_tensor(
        torch.zeros(2, 3, dtype=torch.long), torch.ones(3, 2, 2), (3, 2**40, 2, 2)
    ),
    "csr": lambda: torch.ones(2, 2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "mkldnn": lambda: torch.ones(2, 2).to_mkldnn(),
    "bits": lambda: torch.zeros(2, 2, dtype=torch.uint8).view(torch.uint1),
    "meta": lambda: torch.ones(2, 2, device="meta"),
    "expanded": lambda: torch.ones(1).expand(2**20, 2**20),
}
quiet_unusual = pytest.mark.filterwarnings("ignore:.*(quantiz|deprecat|Sparse|nested).*:UserWarning")


@quiet_unusual
@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("path", sorted(callables._PLAIN_OPERATORS))
def test_plain_operators_take_plain_tensors_only(path, kind):
    """torch crashes with some of the others."""
    operator, odd, usual = resolve(f"torch:{path}", False), UNUSUAL[kind](), torch.ones(2, 2)
    for args, kwargs in [((odd, odd), {}), ((usual, odd), {}), (([usual, (odd,)],), {}), ((usual,), {"other": odd})]:
        with pytest.raises(SerializationError, match=rf"torch's '{path}' takes no .*tensor .*@rpc\.export"):
            operator(*args, **kwargs)


@quiet_unusual
@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("name", ["add", "sum", "clone", "view", "tolist", "double"])
def test_plain_methods_take_plain_tensors_only(name, kind):
    odd = UNUSUAL[kind]()
    for value, args in [(odd, ()), (torch.ones(2, 2), (odd,))]:
        with pytest.raises(SerializationError, match=rf"torch's '{name}' takes no .*tensor .*@rpc\.export"):
            exported_method(value, name)(*args)


@pytest.mark.parametrize("name", ["view", "reshape", "transpose", "clone", "add", "float"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.quint8, torch.uint1])
def test_a_dtype_reinterprets_no_memory(name, dtype):
    method = exported_method(torch.ones(8, 4), name)
    for args, kwargs in [((dtype,), {}), ((), {"dtype": dtype}), (([dtype],), {})]:
        with pytest.raises(SerializationError, match=rf"torch's '{name}' takes no {dtype} from another worker"):
            method(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint32, torch.uint1, torch.bits8, torch.float4_e2m1fn_x2])
def test_results_have_plain_dtypes(dtype):
    with pytest.raises(SerializationError, match="torch's 'zeros' takes no"):
        resolve("torch:zeros", False)(2, 2, dtype=dtype)
    with pytest.raises(SerializationError, match="torch's 'sum' takes no"):
        exported_method(torch.ones(2), "sum")(dtype=dtype)


def test_plain_arguments_go():
    x = torch.arange(6.0).reshape(2, 3)
    assert resolve("torch:sum", False)(x, dim=(0, 1), dtype=torch.float64).dtype is torch.float64
    assert resolve("torch:cat", False)([x, x], 1).shape == (2, 6)
    assert resolve("torch:stack", False)((x, x), dim=0).shape == (2, 2, 3)
    assert resolve("torch:full", False)(torch.Size([2]), 3, dtype=torch.int64, device="cpu").tolist() == [3, 3]
    assert resolve("torch:mul", False)(x, torch.ones(1).expand(2, 3)).tolist() == x.tolist()
    assert exported_method(x, "view")(3, -1).shape == exported_method(x, "reshape")((3, 2)).shape == (3, 2)
    assert exported_method(x, "transpose")(0, 1).shape == (3, 2)
    assert exported_method(torch.nn.Parameter(x), "detach")().tolist() == x.tolist()
    assert exported_method(x.bfloat16(), "float")().dtype is torch.float32


# --- exported classes -----------------------------------------------------------------------------------------------


class Base:
    def inherited(self):
        return "inherited"


class Offered(Base):
    constant = print

    def __init__(self):
        self.attribute = print
        self.shadowed = print

    def method(self, x):
        return x + 1

    def shadowed(self):
        return "of the class"

    @staticmethod
    def static():
        return "static"

    @classmethod
    def of_class(cls):
        return cls

    @property
    def computed(self):
        return print

    class Inner:
        pass

    def _private(self):
        pass

    def __call__(self):
        return "called"


def test_an_exported_class_offers_the_functions_that_it_defines():
    value = export(Offered)()
    assert exported_method(value, "method")(1) == 2
    assert exported_method(value, "static")() == "static"
    assert exported_method(value, "of_class")() is Offered
    assert exported_method(value, "shadowed")() == "of the class"


@pytest.mark.parametrize(
    "name", "inherited attribute computed Inner constant _private __call__ __init__ __class__ none".split()
)
def test_an_exported_class_offers_nothing_else(name):
    value = export(Offered)()
    with pytest.raises(SerializationError, match=rf"Offered\.{name} is not exported here .*Exported: method, of_class"):
        exported_method(value, name)


def test_a_module_offers_no_method_of_torch():
    @export
    class Net(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)

    net = Net(2, 2)
    assert exported_method(net, "forward")(torch.ones(2)).shape == (2,)
    for name in ("load_state_dict", "compile", "register_forward_hook", "weight", "state_dict", "apply"):
        with pytest.raises(SerializationError, match="no attributes, properties or inherited methods"):
            exported_method(net, name)


def test_the_methods_that_are_named_are_exported_and_no_others():
    export(methods=["inherited", "__call__"])(Offered)
    value = Offered()
    assert exported_method(value, "inherited")() == "inherited"
    assert exported_method(value, "__call__")() == "called"
    with pytest.raises(SerializationError, match=r"Offered\.method is not exported here"):
        exported_method(value, "method")


@pytest.mark.parametrize("methods", [["nothing"], ["computed"], "method"])
def test_only_methods_can_be_named(methods):
    with pytest.raises(UsageError, match=r"export\(methods=\.\.\.\)"):
        export(methods=methods)(Offered)


def test_methods_of_a_function_cannot_be_named():
    with pytest.raises(UsageError, match="is for classes"):
        export(methods=["x"])(plain)


def test_a_class_that_is_not_exported_offers_nothing():
    with pytest.raises(SerializationError, match=r"put @rpc\.export on the class"):
        exported_method(Base(), "inherited")
    export(Base)
    with pytest.raises(SerializationError, match=r"put @rpc\.export on the class"):
        exported_method(Offered(), "inherited")


# --- exceptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allow_any", [True, False])
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("builtins:KeyError", KeyError),
        ("telegrad.errors:WorkerLostError", WorkerLostError),
        ("builtins:SystemExit", None),  # would end the caller
        ("builtins:KeyboardInterrupt", None),
        ("builtins:print", None),
        ("builtins:NoSuchError", None),
        ("builtins:", None),
        ("no_such_module:Error", None),
        ("", None),
    ],
)
def test_exception_types(name, found, allow_any):
    assert exception_type(name, allow_any) is found


def test_foreign_exceptions_need_an_import():
    assert exception_type("json.decoder:JSONDecodeError", True).__name__ == "JSONDecodeError"
    assert exception_type("json.decoder:JSONDecodeError", False) is None
    assert not hasattr(builtins, "JSONDecodeError")
