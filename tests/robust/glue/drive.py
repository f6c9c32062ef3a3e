"""Drives pybind/step.c without Go, along all its ways out. Run by test_glue.py; the argument is the library.

After every call all reference counts are what they were, and no block of memory is left.
"""

from __future__ import annotations

import _testcapi
import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch

import roundpipe_go
from roundpipe_go import _places

library = ctypes.PyDLL(sys.argv[1])
answer = ctypes.c_int64.in_dll(library, "stub_answer")
calls = ctypes.c_int64.in_dll(library, "stub_calls")
with_gil = ctypes.c_int64.in_dll(library, "stub_with_gil")
install = library.roundpipe_go_plain_step
install.argtypes, install.restype = [ctypes.py_object] * 5, ctypes.py_object
owners: dict[int, int] = {}
KEY = 1 << 40
arguments = owners, torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter, tuple(_places.learn())
step = install(*arguments)
KNOWN = [(0, 0), (0, 0)]


def optimizer_of(num: int = 20, **options: Any) -> torch.optim.Optimizer:
    """With state, made without Go."""
    params = [torch.nn.Parameter(torch.ones(i % 7, 3)) for i in range(num)]
    optimizer = roundpipe_go.AdamW([{"params": params[:5], "lr": 0.5}, {"params": params[5:]}], **options)
    for i, param in enumerate(params):
        param.grad = torch.ones_like(param)
        state = {"step": torch.tensor(float(i % 4)), "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        optimizer.state[param] = {**state, "max_exp_avg_sq": torch.zeros_like(param)} if options.get("amsgrad") else state
    return optimizer


def lengthen(optimizer: torch.optim.Optimizer) -> None:
    """Makes a step long, for which its storages are held."""
    param = optimizer.param_groups[0]["params"][0]
    tensors = [param, param.grad, *(value for name, value in optimizer.state[param].items() if name != "step")]
    for tensor in tensors:
        tensor.data = torch.zeros((1 << 21) + 1)  # is_long of step.c, on one thread


def objects(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything that the step looks at."""
    found = [optimizer.param_groups, optimizer.state, KNOWN, *KNOWN]
    for group in optimizer.param_groups:
        found += [group, *group.values()]
        for param in group["params"]:
            entry = optimizer.state.get(param, {})
            found += [param, entry, *entry.values()]
    return found


def counts(of: list[Any]) -> list[int]:
    return [sys.getrefcount(each) for each in of]


def unchanged(name: str, call: Callable[[], Any], optimizer: torch.optim.Optimizer, times: int = 3) -> Any:
    """Calls, and compares reference counts before and after."""
    of = objects(optimizer)
    grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    before, result = counts(of + grads), None
    for _ in range(times):
        result = call()
    after = counts(of + grads)
    wrong = [(i, b, a) for i, (b, a) in enumerate(zip(before, after)) if a != b and b < 1000]  # None and the like are everybody's
    assert not wrong, f"{name}: references of {[(type((of + grads)[i]).__name__, b, a) for i, b, a in wrong][:5]}"
    return result


def outcome(optimizer: torch.optim.Optimizer, *changed: Any) -> Any:
    values = [KEY, optimizer.param_groups, optimizer.state, KNOWN, 1, 0]
    values[1 : 1 + len(changed)] = changed
    try:
        return step(*values)
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
    finally:
        assert owners.get(KEY, "another") == "another", "the step is over, and still in owners"


def spoilt() -> dict[str, tuple[Callable[[torch.optim.Optimizer], None], Any]]:
    """Ways to make a step not plain, or wrong, with what comes of it."""

    def group(**values: Any) -> Callable[[torch.optim.Optimizer], None]:
        return lambda o: o.param_groups[1].update(values)

    def state(name: str, value: Any) -> Callable[[torch.optim.Optimizer], None]:
        return lambda o: o.state[o.param_groups[1]["params"][3]].__setitem__(name, value)

    def first(change: Callable[[Any], None]) -> Callable[[torch.optim.Optimizer], None]:
        return lambda o: change(o.param_groups[1]["params"][3])

    class Key:
        def __hash__(self) -> int:
            raise ZeroDivisionError

    return {
        "lr tensor": (group(lr=torch.tensor(0.1)), False),
        "lr text": (group(lr="0.1"), False),
        "lr huge": (group(lr=10**400), False),
        "lr infinite": (group(lr=1e300), False),
        "betas list": (group(betas=[0.9, 0.99]), True),
        "betas other": (group(betas={0.9: 1, 0.99: 2}), False),
        "betas short": (group(betas=(0.9,)), False),
        "beta1 zero": (group(betas=(0.0, 0.9)), False),
        "beta nan": (group(betas=(float("nan"), 0.9)), False),
        "amsgrad number": (group(amsgrad=1), False),
        "foreach": (group(foreach=True), False),
        "params tuple": (lambda o: o.param_groups[1].update(params=tuple(o.param_groups[1]["params"])), False),
        "params missing": (lambda o: o.param_groups[1].pop("params"), False),
        "option missing": (lambda o: o.param_groups[1].pop("eps"), False),
        "group no dict": (lambda o: o.param_groups.append(3), False),
        "param no tensor": (lambda o: o.param_groups[1]["params"].append("no tensor"), False),
        "param None": (lambda o: o.param_groups[1]["params"].append(None), False),
        "param unhashable": (lambda o: o.param_groups[1]["params"].append(Key()), False),
        "no gradients": (lambda o: o.zero_grad(), True),
        "one without gradient": (first(lambda p: setattr(p, "grad", None)), True),
        "no state": (lambda o: o.state.clear(), False),
        "one without state": (lambda o: o.state.pop(o.param_groups[1]["params"][3]), False),
        "long": (lengthen, True),
        "order reversed": (lambda o: o.param_groups[1]["params"].reverse(), True),
        "entry no dict": (lambda o: o.state.__setitem__(o.param_groups[1]["params"][3], [1]), False),
        "exp_avg missing": (lambda o: o.state[o.param_groups[1]["params"][3]].pop("exp_avg"), False),
        "exp_avg number": (state("exp_avg", 3), False),
        "exp_avg None": (state("exp_avg", None), False),
        "exp_avg other shape": (state("exp_avg", torch.zeros(1, 1, 1)), False),
        "exp_avg double": (state("exp_avg", torch.zeros(1, 3, dtype=torch.float64)), False),
        "exp_avg sparse": (state("exp_avg", torch.zeros(1, 3).to_sparse()), False),
        "exp_avg meta": (state("exp_avg", torch.zeros(1, 3, device="meta")), False),
        "exp_avg negative view": (state("exp_avg", torch._neg_view(torch.zeros(1, 3))), False),
        "exp_avg expanded": (state("exp_avg", torch.zeros(1, 1).expand(1, 3)), False),
        "step number": (state("step", 3), False),
        "step long": (state("step", torch.tensor(3)), False),
        "step of two": (state("step", torch.ones(2)), False),
        "step nan": (state("step", torch.tensor(float("nan"))), False),
        "step negative": (state("step", torch.tensor(-1.0)), False),
        "step shared": (
            lambda o: o.state[o.param_groups[1]["params"][3]].update(step=o.state[o.param_groups[0]["params"][2]]["step"]),
            False,
        ),
        "counts many": (lambda o: [e.update(step=torch.tensor(100.0 * i)) for i, e in enumerate(o.state.values())], True),
        "two precisions": (
            lambda o: setattr(o.param_groups[0]["params"][3], "data", torch.ones(3, 3, dtype=torch.float64)),
            False,
        ),
        "strided": (lambda o: setattr(o.param_groups[0]["params"][3], "data", torch.ones(6, 3)[::2]), False),
    }


def drive() -> None:
    for amsgrad in (False, True):
        for name, (spoil, want) in {"plain": (lambda o: None, True), **spoilt()}.items():
            optimizer = optimizer_of(amsgrad=amsgrad)
            spoil(optimizer)
            answer.value = 0
            before = calls.value
            try:
                got = unchanged(name, lambda o=optimizer: outcome(o), optimizer)
            except (AttributeError, KeyError, TypeError, ZeroDivisionError):  # objects() finds no way through it
                got = [outcome(optimizer) for _ in range(3)][-1]
            assert got == want, f"{name}: got {got!r}, want {want!r}"
            if want is not True:
                assert calls.value == before, f"{name}: Go was called"
    optimizer = optimizer_of(amsgrad=True)
    for value, want in ((0, True), (7, False), (-1, "RuntimeError: stub: refused 1 calls")):
        answer.value = value
        got = unchanged(f"answer {value}", lambda: outcome(optimizer), optimizer)
        assert got == want, f"answer {value}: {got!r}"
    answer.value = 0
    for changed, want in [((), True), ((3,), False), (([], {}), True), (([], 3), False)]:
        assert unchanged("arguments", lambda c=changed: outcome(optimizer, *c), optimizer) == want, changed
    for others, want in (({KEY: "another"}, False), ({KEY + 1: "another"}, True), ({}, True)):
        owners.update(others)
        before = calls.value
        assert unchanged("owners", lambda: outcome(optimizer), optimizer) == want, others
        assert (calls.value > before) == want
        owners.clear()
    for known in ([None, None], [(1, "x"), None], [(1,), None], [3, None], [None], (None, None)):
        got = unchanged("settings", lambda k=known: outcome(optimizer, optimizer.param_groups, optimizer.state, k), optimizer)
        assert got is False or "Error" in got, (known, got)
    for few in ((), (1,), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6), ("key", [], {}, KNOWN, 1, 0)):
        try:
            step(*few)
            raise AssertionError(few)
        except TypeError:
            pass


def lengths() -> None:
    """The longest steps that keep the GIL, and the shortest that let it go, for each of the rules."""

    def keeps_gil(numel: int, dtype: torch.dtype, threads: int, backend: int, num: int = 1) -> bool:
        params = [torch.nn.Parameter(torch.zeros(numel, dtype=dtype)) for _ in range(num)]
        optimizer = roundpipe_go.Adam(params)
        for param in params:
            param.grad = torch.zeros_like(param)
            optimizer.state[param] = {"step": torch.tensor(0.0), "exp_avg": param.grad, "exp_avg_sq": param.grad}
        assert step(KEY, optimizer.param_groups, optimizer.state, KNOWN, threads, backend) is True
        return bool(with_gil.value)

    most = 1 << 21
    for longest, *how in (
        (most, torch.float32, 1, 1),
        (2 * most + 1, torch.float32, 2, 1),
        (2 * most + 1, torch.float32, 16, 2),
        (most // 4, torch.float64, 1, 2),
        (most // 64, torch.float32, 1, 0),
        (4096, torch.float32, 2, 1, 1100),  # as long as the reading of 1,100 parameters
    ):
        assert keeps_gil(longest, *how), how
        assert not keeps_gil(longest + 8, *how), how
    assert not keeps_gil(2048, torch.float32, 1, 1, 4097), "longer than anybody is to wait"


def starving() -> torch.optim.Optimizer:
    """An optimizer whose step needs all that it can need: long, many counts, counters that must be sorted."""
    optimizer = optimizer_of(40, amsgrad=True)
    for i, entry in enumerate(optimizer.state.values()):
        entry["step"].fill_(i % 10)
    optimizer.param_groups[1]["params"].reverse()
    lengthen(optimizer)
    return optimizer


def starved(optimizer: torch.optim.Optimizer, nth: int) -> bool:
    """A step in which the nth allocation fails. Whether it raised."""
    _testcapi.set_nomemory(nth, nth + 1)
    try:
        step(KEY, optimizer.param_groups, optimizer.state, KNOWN, 1, 0)
    except MemoryError:
        return True
    except RuntimeError as error:  # in torch's words
        return "allocate" in str(error)
    finally:
        _testcapi.remove_mem_hooks()
    return False


def starve() -> int:
    """Every allocation fails once: MemoryError, or a way around it, and no reference is lost."""
    optimizer = starving()
    assert outcome(optimizer) is True
    refused = 0
    for nth in range(1, 100):
        refused += unchanged(f"allocation {nth} failed", lambda n=nth: starved(optimizer, n), optimizer, times=1)
    assert outcome(optimizer) is True
    return refused


def reinstall() -> None:
    """Wrong interfaces are refused; the old one stays."""

    class Exchange(ctypes.Structure):
        _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("pointers", ctypes.c_void_p * 6)]

    new = ctypes.pythonapi.PyCapsule_New
    new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
    other = Exchange(2, 0)
    empty = Exchange(1, 0)
    for capsule in (
        new(ctypes.addressof(other), b"dlpack_exchange_api", None),
        new(ctypes.addressof(empty), b"dlpack_exchange_api", None),
    ):
        try:
            install(owners, capsule, *arguments[2:])
            raise AssertionError("another version was taken")
        except ImportError:
            pass
    for wrong in (
        ("no dict", *arguments[1:]),
        (owners, "no capsule", *arguments[2:]),
        (*arguments[:4], (1, 2)),
        (*arguments[:4], ("a",) * 5),
    ):
        try:
            install(*wrong)
            raise AssertionError(wrong)
        except (ValueError, TypeError):
            pass
    assert outcome(optimizer_of()) is True


def leaves_nothing(name: str, call: Callable[[], Any], rounds: int = 60) -> None:
    """Compares Python's count of blocks over many calls."""
    for _ in range(5):  # until caches are full
        call()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(rounds):
        call()
    gc.collect()
    left = sys.getallocatedblocks() - before
    assert left < rounds // 2, f"{name}: {left} blocks left by {rounds} calls"


def leak() -> None:
    for name, (spoil, _) in {"plain": (lambda o: None, True), **spoilt()}.items():
        optimizer = optimizer_of(amsgrad=True)
        spoil(optimizer)
        leaves_nothing(name, lambda o=optimizer: outcome(o))
    answered = optimizer_of()
    for value in (7, -1, 0):
        answer.value = value
        leaves_nothing(f"answer {value}", lambda: outcome(answered))
    optimizer = starving()
    assert outcome(optimizer) is True  # torch keeps the Python object of a storage, once it was asked for
    for nth in range(1, 60):
        leaves_nothing(f"allocation {nth} failed", lambda n=nth: starved(optimizer, n), rounds=20)


drive()
lengths()
refusals = starve()
assert refusals >= 5, refusals
reinstall()
leak()
print(refusals, calls.value, "done")
