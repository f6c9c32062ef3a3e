"""A step that is interrupted anywhere has happened, or has not: parameters, moments and counters together."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import roundpipe_go
from oracle import assert_equal_bits, assert_unchanged, snapshot
from roundpipe_go import _step
from roundpipe_go._binding import EXCHANGE_API

PACKAGE = str(Path(roundpipe_go.__file__).parent)


def plain() -> list[dict[str, Any]]:
    return [
        {"params": [torch.linspace(-1, 1, n).requires_grad_() for n in (300, 7)]},
        {"params": [torch.linspace(-1, 1, 20).requires_grad_()], "weight_decay": 0.1},
    ]


def two_precisions() -> list[dict[str, Any]]:
    return [*plain(), {"params": [torch.linspace(-1, 1, 9, dtype=torch.float64).requires_grad_()]}]


def by_the_long_way() -> list[dict[str, Any]]:
    return [{**plain()[0], "lr": torch.tensor(0.1)}]


def stepped(make_groups: Callable[[], list[dict[str, Any]]], steps: int) -> torch.optim.Optimizer:
    optimizer = roundpipe_go.AdamW(make_groups(), lr=0.1)
    for _ in range(steps):
        step(optimizer)
    return optimizer


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = param.detach().cos()
    optimizer.step()


def values(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {name: copied for name, _, copied in snapshot(optimizer)}


def in_another_thread(call: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def assert_values(optimizer: torch.optim.Optimizer, want: dict[str, Tensor], where: str) -> None:
    got = values(optimizer)
    assert got.keys() == want.keys(), where
    for name, value in want.items():
        assert_equal_bits(got[name], value, f"{where}: {name}")


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that this package executes, as Ctrl-C may.

    Attributes:
        lines: how many have been executed.
        where: the line at which it was raised, or None.
    """

    def __init__(self, at: int) -> None:
        self.lines, self.where, self._at = 0, None, at

    def __enter__(self) -> Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize(("make_groups", "groups"), [(plain, 0), (two_precisions, 3), (by_the_long_way, 1)])
def test_the_ways_that_are_interrupted(make_groups, groups):
    """How many groups go the long way; else the next test would try the same way thrice."""
    optimizer = stepped(make_groups, 1)
    with mock.patch.object(_step.Step, "add", autospec=True, side_effect=_step.Step.add) as add:
        step(optimizer)
    if make_groups is plain and EXCHANGE_API is None:
        groups = len(optimizer.param_groups)  # this torch has no other way
    assert add.call_count == groups


@pytest.mark.parametrize("make_groups", [plain, two_precisions, by_the_long_way], ids=lambda f: f.__name__)
def test_interrupted_at_every_line(make_groups):
    """All is as before or all is as after, wherever Ctrl-C comes; and the next step is right."""
    before, after, later = (values(stepped(make_groups, steps)) for steps in (2, 3, 4))
    optimizer = stepped(make_groups, 2)
    tensors = [(tensor, copied) for _, tensor, copied in snapshot(optimizer)]
    seen = set()
    for at in itertools.count(1):
        with torch.no_grad():
            for tensor, copied in tensors:
                tensor.copy_(copied)
        try:
            with Interrupt(at) as interrupt:
                step(optimizer)
        except KeyboardInterrupt:
            pass
        else:
            assert interrupt.where is None, f"the interrupt at {interrupt.where} was swallowed"
            break  # the step has fewer lines
        happened = bool((optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 3).item())
        seen.add(happened)
        assert_values(optimizer, after if happened else before, f"interrupted at {interrupt.where}")
        if at % 10 == 0:
            in_another_thread(lambda: step(optimizer))
            assert_values(optimizer, later if happened else after, f"after that interrupted at {interrupt.where}")
    assert at > 20
    assert seen == {False, True}


def failing_closure(optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Tensor:
        raise ZeroDivisionError

    optimizer.step(closure)


def failing_pre_hook(optimizer: torch.optim.Optimizer) -> None:
    def hook(*_: Any) -> None:
        raise ZeroDivisionError

    with optimizer.register_step_pre_hook(hook):
        step(optimizer)


@pytest.mark.parametrize("fail", [failing_closure, failing_pre_hook], ids=lambda f: f.__name__)
@pytest.mark.parametrize("steps", [0, 2])
def test_what_fails_before_the_step_changes_nothing(fail, steps):
    optimizer, want = stepped(two_precisions, steps), stepped(two_precisions, steps)
    before = snapshot(optimizer)
    with pytest.raises(ZeroDivisionError):
        fail(optimizer)
    assert_unchanged(before)
    assert len(optimizer.state) == len(want.state)
    step(optimizer)
    step(want)
    assert_values(optimizer, values(want), "the step after")


def test_what_fails_after_the_step_leaves_it_done():
    def hook(*_: Any) -> None:
        raise ZeroDivisionError

    optimizer, want = stepped(two_precisions, 2), stepped(two_precisions, 3)
    with pytest.raises(ZeroDivisionError), optimizer.register_step_post_hook(hook):
        step(optimizer)
    assert_values(optimizer, values(want), "the step after")


def test_the_closures_gradients_count():
    """A closure that raises after backward: the gradients are there, the step is not."""
    optimizer = stepped(plain, 2)
    (param, *_) = optimizer.param_groups[0]["params"]
    before = snapshot(optimizer)

    def closure() -> Tensor:
        param.sum().backward()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert_unchanged(before)
    optimizer.step()
    assert optimizer.state[param]["step"].item() == 3


def test_refusal_in_the_last_group_leaves_the_first():
    """Groups are one step: what torch would have written before it raises, stays as it was."""
    optimizer = stepped(plain, 2)
    before = snapshot(optimizer)
    (param,) = optimizer.param_groups[1]["params"]
    optimizer.state[param]["exp_avg"] = torch.zeros(21)
    kept = [row for row in before if not row[0].endswith("groups[1].params[0].exp_avg")]
    with pytest.raises(RuntimeError), pytest.warns(roundpipe_go.FallbackWarning):
        step(optimizer)
    assert_unchanged(kept)


def in_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda tensor: torch._neg_view(tensor.clone()),
    "conjugated": lambda tensor: tensor.conj(),
    "double": lambda tensor: tensor.to(torch.complex128 if tensor.is_complex() else torch.float64),
    "zero": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "in inference mode": in_inference_mode,
    "expanded": lambda tensor: tensor[:1].clone().expand(tensor.shape),
    "shorter": lambda tensor: tensor[1:].clone(),
    "sparse": lambda tensor: tensor.to_sparse(),
}
"""Tensors that torch refuses in some places and computes with in others. As param.data they are under the same parameter."""

BEYOND_MEMORY = ("expanded", "shorter", "sparse", "zero")
"""Of these, those that torch's fused kernel would write beyond, for it looks at the parameter's length alone."""

FORMULAS: dict[str, dict[str, Any]] = {
    "served": {},
    "beta1 = 0": {"betas": (0.0, 0.999)},
    "foreach": {"foreach": True},
    "foreach, beta1 = 0": {"foreach": True, "betas": (0.0, 0.999)},
    "fused": {"fused": True},
    "lr tensor": {"lr": torch.tensor(0.1, dtype=torch.float64)},
    "capturable": {"capturable": True, "lr": torch.tensor(0.1)},
    "differentiable": {"differentiable": True},
}


@pytest.mark.filterwarnings("ignore")  # of every reason, and torch's own of conversions
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("odd", ODD)
def test_odd_tensor_under_every_formula(odd, formula, dtype):
    """What torch refuses is refused in its words and changes nothing; what it takes has its bits."""
    for name in ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"):
        if (formula == "fused" and odd in BEYOND_MEMORY) or (name == "step" and odd in ("expanded", "shorter")):
            continue
        outcomes = []
        for cls in (roundpipe_go.AdamW, torch.optim.AdamW):
            optimizer = cls(
                [{"params": [torch.linspace(-1, 1, n, dtype=dtype).requires_grad_() for n in (5, 6)]} for _ in range(2)],
                amsgrad=True,
                weight_decay=0.1,
            )
            step(optimizer)
            step(optimizer)
            last = optimizer.param_groups[1]["params"][1]
            optimizer.param_groups[1].update(FORMULAS[formula])
            with contextlib.suppress(RuntimeError):  # a parameter takes no data, and no gradient, of another kind
                if name in ("param", "grad"):
                    setattr(last, *("data", ODD[odd](last.data)) if name == "param" else ("grad", ODD[odd](last.grad)))
                else:
                    optimizer.state[last][name] = ODD[odd](optimizer.state[last][name])
            before = snapshot(optimizer)
            try:
                optimizer.step()
                outcomes.append((None, values(optimizer)))
            except Exception as error:
                outcomes.append((f"{type(error).__name__}: {error}", {}))
                if cls is roundpipe_go.AdamW:
                    assert_unchanged(before)
        (ours, got), (torchs, want) = outcomes
        assert ours == torchs, name
        for key, value in want.items():
            assert_equal_bits(got[key], value, f"{name} {odd}: {key}")


@pytest.mark.parametrize("failing", range(8))
def test_out_of_memory_while_state_is_made(failing, monkeypatch):
    """Which of the allocations of the first step fails does not matter: the step can be taken again."""
    optimizer, want = stepped(plain, 0), stepped(plain, 1)
    zeros_like, calls = torch.zeros_like, [0]

    def limited(*arguments: Any, **options: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == failing + 1:
            raise MemoryError
        return zeros_like(*arguments, **options)

    before = snapshot(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", limited)
        if failing < 6:
            with pytest.raises(MemoryError):
                step(optimizer)
            assert_unchanged(before)
        else:
            step(optimizer)
            assert calls[0] == 6
    if failing < 6:
        step(optimizer)
    assert_values(optimizer, values(want), "the step after")
    assert copy.deepcopy(optimizer).state_dict()["state"].keys() == want.state_dict()["state"].keys()
