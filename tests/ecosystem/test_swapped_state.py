"""``torch.optim.swap_in_optimizer_params_and_state``: a step on other tensors than the optimizer's own, or a trace of it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree

from roundpipe_go import _fallback

from .training import CLASSES, OPTIONS, assert_same_bits, both_classes, compare, copied, loss_of, make_batches, make_model, record

try:
    from torch.optim._stateless import swap_in_optimizer_params_and_state
except ImportError:
    pytest.skip(f"torch {torch.__version__} has no swap_in_optimizer_params_and_state", allow_module_level=True)


def trained(optimizer_class, **options):
    model = make_model()
    optimizer = optimizer_class(model.parameters(), **OPTIONS, **options)
    for batch in make_batches(2):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model, optimizer


@both_classes
def test_step_on_swapped_tensors(name):
    def train(optimizer_class):
        model, optimizer = trained(optimizer_class)
        before = record(model, optimizer)
        params = {key: param.detach().clone() for key, param in model.named_parameters()}
        for param in params.values():
            param.grad = torch.ones_like(param)
        state = optimizer.state_dict()
        state["state"] = {key: {k: v.clone() for k, v in value.items()} for key, value in state["state"].items()}
        with swap_in_optimizer_params_and_state(optimizer, params, state):
            optimizer.step()
        assert_same_bits(record(model, optimizer), before)
        return copied(params), copied(state)

    compare(train, name, num_steps=3)


def graph(optimizer_class, **options):
    """The code of a step traced over fake tensors; the optimizer's own must not change."""
    model, optimizer = trained(optimizer_class, **options)
    before = record(model, optimizer)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        params = {key: mode.from_tensor(param) for key, param in model.named_parameters()}
        state = _pytree.tree_map_only(torch.Tensor, mode.from_tensor, optimizer.state_dict())

    def step(params, state):
        for param in params.values():
            param.grad = torch.ones_like(param)
        with swap_in_optimizer_params_and_state(optimizer, params, state):
            optimizer.step()
        return params, state

    try:
        return make_fx(step)(params, state).code
    finally:
        assert_same_bits(record(model, optimizer), before)


@both_classes
def test_trace_over_fake_tensors(name):
    """Nothing fake may reach Go. On the CPU torch can trace its fused step only."""
    torch_class, go_class = CLASSES[name]
    want = graph(torch_class, fused=True)
    assert "_fused_adam" in want
    with mock.patch.object(_fallback, "warn"):
        assert graph(go_class, fused=True) == want


@both_classes
def test_trace_that_torch_refuses(name):
    """The default step reads a counter, which a fake tensor does not have: the same exception, and nothing is written."""
    for optimizer_class in CLASSES[name]:
        with mock.patch.object(_fallback, "warn"), pytest.raises(DataDependentOutputException):
            graph(optimizer_class)
