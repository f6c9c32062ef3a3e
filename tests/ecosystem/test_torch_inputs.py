"""The inputs by which torch tests its own Adam and AdamW, good and bad, from the installed torch."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from roundpipe_go import _fallback

from .training import CLASSES, assert_same_bits, compare, engine, loss_of, make_batches, make_model, record

# torch.testing._internal asks for it.
engine("expecttest")

from torch.testing._internal import common_optimizers  # noqa: E402

INFOS = {info.optim_cls.__name__: info for info in common_optimizers.optim_db if info.optim_cls.__name__ in CLASSES}

ACCELERATORS_ONLY = "capturable"
"""In the kwargs of inputs that torch refuses on the CPU; test_capturable_is_refused_as_by_torch has them."""


def inputs(name: str) -> list[Any]:
    """All constructor inputs of a class, those that torch lists for accelerators included, each once."""
    info = INFOS[name]
    found = [item for device in ("cpu", "cuda", "mps") for item in info.optim_inputs_func(device=device, dtype=torch.float32)]
    return list({item.desc: item for item in found}.values())


def parameters(select: Callable[[Any], bool]) -> list[Any]:
    return [
        pytest.param(name, item.kwargs, id=f"{name}-{item.desc}".replace(" ", "_"))
        for name in CLASSES
        for item in inputs(name)
        if select(item)
    ]


def train(optimizer_class: type[torch.optim.Optimizer], kwargs: dict[str, Any]) -> Any:
    model = make_model()
    # A copy: a tensor lr must not be shared by two trainings.
    optimizer = optimizer_class(model.parameters(), **copy.deepcopy(kwargs))
    for batch in make_batches(4):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return record(model, optimizer)


def raised(function: Callable[[], Any]) -> tuple[type[BaseException], str]:
    """Type and text of what a call raises or, with warnings as errors, warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A pytest.raises in a loop would not say which class was silent.
        try:
            function()
        except Exception as error:
            return type(error), str(error)
    raise AssertionError("nothing was raised")


def assert_same_through_torch(train: Callable[[type[torch.optim.Optimizer]], Any], name: str) -> None:
    torch_class, go_class = CLASSES[name]
    want = train(torch_class)
    with mock.patch.object(_fallback, "warn") as warn:
        got = train(go_class)
    assert warn.call_count > 0
    assert_same_bits(got, want)


def test_inputs_are_found():
    assert set(INFOS) == set(CLASSES)
    for name in CLASSES:
        assert any(ACCELERATORS_ONLY not in item.kwargs for item in inputs(name))


@pytest.mark.parametrize("flag", [None, "foreach", "maximize"])
@pytest.mark.parametrize(("name", "kwargs"), parameters(lambda item: ACCELERATORS_ONLY not in item.kwargs))
def test_input_trains_with_the_same_bits(name, kwargs, flag):
    if flag == "foreach" and isinstance(kwargs.get("lr"), torch.Tensor):
        flag = None  # torch refuses the pair
    kwargs = kwargs | ({flag: True} if flag else {})
    compare(lambda optimizer_class: train(optimizer_class, kwargs), name, num_steps=4)


@pytest.mark.parametrize(("name", "kwargs"), parameters(lambda item: ACCELERATORS_ONLY not in item.kwargs))
def test_fused_input_is_left_to_torch(name, kwargs):
    assert_same_through_torch(lambda optimizer_class: train(optimizer_class, kwargs | {"fused": True}), name)


@pytest.mark.parametrize(("name", "kwargs"), parameters(lambda item: ACCELERATORS_ONLY not in item.kwargs))
def test_differentiable_input_is_left_to_torch(name, kwargs):
    """The step is part of the graph: compared are the gradients through one."""

    def gradients(optimizer_class):
        torch.manual_seed(0)
        start, grad = (torch.randn(7, requires_grad=True) for _ in range(2))
        param = start.clone()
        optimizer = optimizer_class([param], differentiable=True, **copy.deepcopy(kwargs))
        param.grad = grad.clone()
        optimizer.step()
        return torch.autograd.grad(param.sum(), [start, grad])

    assert_same_through_torch(gradients, name)


@pytest.mark.parametrize(("name", "kwargs"), parameters(lambda item: ACCELERATORS_ONLY in item.kwargs))
def test_capturable_is_refused_as_by_torch(name, kwargs):
    """On the CPU torch takes capturable in the constructor and refuses the step."""
    with mock.patch.object(_fallback, "warn"):
        want, got = (raised(lambda c=c: train(c, kwargs)) for c in CLASSES[name])
    assert got == want


@pytest.mark.parametrize(
    ("name", "error"),
    [
        pytest.param(name, error, id=f"{name}-{i}-{error.optimizer_error_input.desc}".replace(" ", "_"))
        for name in CLASSES
        for i, error in enumerate(INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float32))
    ],
)
def test_error_has_the_type_and_text_of_torch(name, error):
    item = error.optimizer_error_input
    at_construction = error.error_on is common_optimizers.OptimizerErrorEnum.CONSTRUCTION_ERROR

    def attempt(optimizer_class):
        params = [torch.nn.Parameter(torch.ones(3))] if item.params is None else item.params
        optimizer = optimizer_class(params, **item.kwargs)
        if not at_construction:
            optimizer.step()

    want, got = (raised(lambda c=c: attempt(c)) for c in CLASSES[name])
    assert got == want
    assert issubclass(got[0], error.error_type)
    assert re.search(error.error_regex, got[1])
