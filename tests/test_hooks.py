"""torch's hooks and profiler range around a step: there for whoever looks, left out where nobody does."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import OrderedDict
from unittest import mock

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import roundpipe_go
from roundpipe_go import _binding


class Named(roundpipe_go.Adam):
    """A class of the user's, with a step of its own."""

    def step(self, closure=None):
        return super().step(closure)


def optimizer_of(cls: type[roundpipe_go.Adam]) -> roundpipe_go.Adam:
    param = torch.ones(5, requires_grad=True)
    param.grad = torch.ones(5)
    optimizer = cls([param])
    optimizer.step()
    return optimizer


@pytest.fixture(params=[roundpipe_go.Adam, roundpipe_go.AdamW, Named])
def optimizer(request) -> roundpipe_go.Adam:
    return optimizer_of(request.param)


@contextlib.contextmanager
def ranges():
    """Collects the names of torch's profiler ranges."""
    found: list[str] = []

    def record_function(name):
        found.append(name)
        return contextlib.nullcontext()

    with mock.patch.object(torch.autograd.profiler, "record_function", record_function):
        yield found


def test_nobody_looks(optimizer):
    with ranges() as found:
        optimizer.step()
    assert found == []
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].item() == 2


class Pass(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class PassDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def removing(handle):
    try:
        yield
    finally:
        handle.remove()


LOOKING = {
    "profiler": lambda _: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "autograd profiler": lambda _: torch.autograd.profiler.profile(),
    "function mode": lambda _: Pass(),
    "dispatch mode": lambda _: PassDispatch(),
    "pre-hook": lambda o: removing(o.register_step_pre_hook(lambda *_: None)),
    "post-hook": lambda o: removing(o.register_step_post_hook(lambda *_: None)),
    "pre-hook of all": lambda _: removing(register_optimizer_step_pre_hook(lambda *_: None)),
    "post-hook of all": lambda _: removing(register_optimizer_step_post_hook(lambda *_: None)),
}


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
@pytest.mark.parametrize("looking", LOOKING)
def test_somebody_looks(looking, optimizer):
    with LOOKING[looking](optimizer), ranges() as found:
        optimizer.step()
    assert f"Optimizer.step#{type(optimizer).__name__}.step" in found
    with ranges() as found:
        optimizer.step()
    assert found == []


def test_a_profile_has_the_range(optimizer):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert f"Optimizer.step#{type(optimizer).__name__}.step" in {event.name for event in profile.events()}


def test_an_execution_trace_has_the_range(optimizer, tmp_path):
    """No profiler runs then: only the observers of torch's C++ know."""
    path = tmp_path / "trace.json"
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    optimizer.step()
    observer.stop()
    observer.unregister_callback()
    names = [node["name"] for node in json.loads(path.read_text())["nodes"]]
    assert f"Optimizer.step#{type(optimizer).__name__}.step" in names


def test_a_hook_registered_by_the_closure(optimizer):
    """torch looks for post-hooks when the step is over."""
    calls = []

    def closure():
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        return 3

    assert optimizer.step(closure) == 3
    assert set(calls) == {"post"}


def test_without_the_symbol_torchs_hooks_are_always_there(optimizer, monkeypatch):
    """As in a torch whose C++ has another name for it."""
    monkeypatch.setattr(_binding, "_libtorch_cpu", lambda: _binding.ctypes.CDLL(None))
    always = _binding.has_record_function_observers.__wrapped__()
    assert always() is True
    monkeypatch.setattr(_binding, "has_record_function_observers", lambda: always)
    with ranges() as found:
        optimizer.step()
    assert found


def patched_hooks():
    """As a test of the user's does, to have no hooks of others."""
    return mock.patch.object(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", OrderedDict())


def test_replaced_dictionaries_of_hooks(optimizer):
    calls = []
    with patched_hooks():
        register_optimizer_step_post_hook(lambda *_: calls.append("post"))
        optimizer.step()
    optimizer.step()
    assert set(calls) == {"post"}


class Registering(roundpipe_go.Adam):
    """Registers a hook in the middle of each step."""

    calls = 0

    def _init_group(self, *arguments):
        def hook(*_):
            self.calls += 1
            handle.remove()

        handle = self.register_step_post_hook(hook)
        return super()._init_group(*arguments)


def test_a_hook_registered_by_a_method():
    optimizer = optimizer_of(Registering)
    optimizer.step()
    assert optimizer.calls == 2


class Coded(roundpipe_go.Adam):
    """Has code of its own where torch's profilers look."""

    calls = 0

    def _optimizer_step_code(self):
        self.calls += 1


def test_step_code_of_a_subclass():
    optimizer = optimizer_of(Coded)
    optimizer.step()
    assert optimizer.calls == 2


def test_a_tool_that_puts_more_around(monkeypatch):
    """It replaces torch's function for all optimizers made from then on."""
    seen = []

    def profile_hook_step(func):
        def step(*args, **kwargs):
            seen.append(args[0])
            return func(*args, **kwargs)

        return step

    monkeypatch.setattr(torch.optim.Optimizer, "profile_hook_step", staticmethod(profile_hook_step))

    class Late(roundpipe_go.Adam):
        def step(self, closure=None):
            return super().step(closure)

    optimizer = optimizer_of(Late)
    assert seen == [optimizer]
