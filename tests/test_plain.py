"""The short way of a plain step: that it is taken, that it knows what is not plain, and that other threads cannot break it."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import roundpipe_go
from cases import VARIANTS
from oracle import Twins, randn_like
from roundpipe_go import _binding, _places, _step

EXCHANGE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
"""Whether this torch has what the short way needs; before 2.10 or so every step goes the long way, which must be right too."""


@pytest.fixture
def long_ways(monkeypatch) -> list[int]:
    """Has an entry for each group that went the long way."""
    counted: list[int] = []
    add = _step.Step.add

    def count(self, lists, options):
        counted.append(len(lists[0]))
        add(self, lists, options)

    monkeypatch.setattr(_step.Step, "add", count)
    return counted


def params() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (), (1,), (0,), (129,), (2, 3, 4), (40, 30)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant[0])
def test_plain_steps_go_the_short_way_but_the_first(variant, long_ways):
    _, cls, decay, options = variant
    twins = Twins(params, cls, lr=0.1, **decay, **options)
    twins.train(5)
    twins.assert_equal()
    assert len(long_ways) == (1 if EXCHANGE else 5), "the first step makes the state"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant[0])
def test_the_long_way_has_the_same_bits(variant, long_ways, monkeypatch):
    monkeypatch.setattr(_binding, "plain_step", lambda: None)
    _, cls, decay, options = variant
    twins = Twins(params, cls, lr=0.1, **decay, **options)
    twins.train(5)
    twins.assert_equal()
    assert len(long_ways) == 5


def test_the_short_way_also_where_dynamo_was_loaded(long_ways):
    """It wraps _init_group in torch's classes."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    twins = Twins(params, lr=0.1)
    twins.train(3)
    twins.assert_equal()
    assert len(long_ways) == (1 if EXCHANGE else 3)


def test_an_init_group_of_the_users_own_is_called(long_ways):
    class Counting(roundpipe_go.AdamW):
        calls = 0

        def _init_group(self, *arguments):
            Counting.calls += 1
            return super()._init_group(*arguments)

    param = torch.ones(3, requires_grad=True)
    optimizer = Counting([param])
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.step()
    assert Counting.calls == len(long_ways) == 3


def test_torchs_init_group_replaced_by_the_user(monkeypatch, long_ways):
    """In torch's own class, where both optimizers inherit it."""
    init_group = torch.optim.Adam._init_group

    def doubling(self, group, *lists):
        found = init_group(self, group, *lists)
        lists[1][:] = [grad * 2 for grad in lists[1]]
        return found

    twins = Twins(params, roundpipe_go.Adam, lr=0.1)
    twins.train(2)
    monkeypatch.setattr(torch.optim.Adam, "_init_group", doubling)
    twins.train(2)
    twins.assert_equal()


def frozen(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["params"][step % 3].grad = None


def many_counts(optimizer: torch.optim.Optimizer, step: int) -> None:
    for i, state in enumerate(optimizer.state.values()):
        state["step"] = torch.tensor(float(10 * step + i))


def reordered(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["params"].reverse()


@pytest.mark.parametrize("change", [frozen, many_counts, reordered], ids=lambda change: change.__name__)
def test_odd_but_plain(change):
    twins = Twins(lambda: [*params(), *(torch.ones(2).requires_grad_() for _ in range(70))], lr=0.1, amsgrad=True)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        twins.set_grads([randn_like(param, generator) for param in twins.params])
        for optimizer in twins:
            change(optimizer, step)
            optimizer.step()
        states = [{k: v for p in o.param_groups[0]["params"] for k, v in [(id(p), o.state[p])]} for o in twins]
        for ours, theirs in zip(*(state.values() for state in states)):
            assert {k: v.tolist() for k, v in ours.items()} == {k: v.tolist() for k, v in theirs.items()}
        for ours, theirs in zip(*(optimizer.param_groups[0]["params"] for optimizer in twins)):
            assert torch.equal(ours, theirs)


def channels_last(shape: tuple[int, ...]) -> Tensor:
    return torch.linspace(-1, 1, math.prod(shape)).view(shape).to(memory_format=torch.channels_last)


PLAIN = {
    "float64": lambda: [torch.linspace(-1, 1, 77, dtype=torch.float64), torch.ones((), dtype=torch.float64)],
    "complex64": lambda: [torch.linspace(-1, 1, 34).view(17, 2), torch.ones(2, 3, 2)],
    "complex128": lambda: [torch.linspace(-1, 1, 34, dtype=torch.float64).view(17, 2)],
    "channels_last": lambda: [channels_last((4, 3, 5, 6)), channels_last((1, 8, 1, 3))],
    "transposed": lambda: [torch.linspace(-1, 1, 35).view(5, 7).t(), torch.linspace(-1, 1, 24).view(2, 3, 4).permute(2, 0, 1)],
    "slices": lambda: [torch.linspace(-1, 1, 60).view(6, 10)[1:4], torch.linspace(-1, 1, 9)[3:7]],
    "size-1 strides": lambda: [torch.linspace(-1, 1, 6).as_strided((1, 6, 1), (77, 1, 99))],
}


@pytest.mark.skipif(not EXCHANGE, reason="this torch has no C exchange API, and every step goes the long way")
@pytest.mark.parametrize("kind", PLAIN)
def test_what_is_plain(kind, long_ways):
    """Every precision, and every dense order, if it is that of all tensors of the parameter."""

    def make() -> list[Tensor]:
        tensors = PLAIN[kind]()
        if kind.startswith("complex"):
            tensors = [torch.view_as_complex(tensor) for tensor in tensors]
        return [tensor.requires_grad_() for tensor in tensors]

    twins = Twins(make, lr=0.1, weight_decay=0 if kind.startswith("complex") else 0.1)
    for step in range(4):
        for params in (twins.params, twins.torch_params):
            for param in params:
                grad = torch.empty_like(param, requires_grad=False)
                param.grad = grad.copy_(torch.arange(param.numel()).view(param.shape) * (0.1 + step) - 3)
        for optimizer in twins:
            optimizer.step()
    twins.assert_equal()
    assert len(long_ways) == 1


@pytest.mark.skipif(not EXCHANGE, reason="this torch has no C exchange API, and every step goes the long way")
@given(
    lr=st.one_of(st.floats(1e-12, 1e12), st.integers(0, 5)),
    betas=st.tuples(st.floats(2**-24, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    eps=st.one_of(st.floats(0, 1), st.just(0)),
    weight_decay=st.one_of(st.floats(0, 1e6), st.just(0), st.just(1)),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
    cls=st.sampled_from([roundpipe_go.Adam, roundpipe_go.AdamW]),
    count=st.floats(0, 1e9),
    double=st.booleans(),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_constants_are_those_of_the_long_way(cls, count, double, **options):
    """Both ways form them, one in C and one in Python; torch decides."""
    results = []
    for plain in (True, False):
        twins = Twins(lambda: [torch.linspace(-1, 1, 9, dtype=torch.float64 if double else torch.float32).requires_grad_()], cls)
        twins.train(1)
        for optimizer in twins:
            optimizer.param_groups[0].update(options)
            (state,) = optimizer.state.values()
            state["step"].fill_(count)
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
        with nullcontext() if plain else mock.patch.object(_binding, "plain_step", return_value=None):
            twins.train(2)
        twins.assert_equal()
        results.append(twins.params[0].detach())
    assert torch.equal(results[0].isnan(), results[1].isnan())
    assert torch.equal(results[0].nan_to_num(), results[1].nan_to_num())


def test_the_places_are_found():
    """A torch that has the exchange API, but hides what it does not tell, would silently take the long way."""
    places = _places.learn()
    assert places is not None
    tensor = torch.ones(3)
    assert _places._word(id(tensor) + places.implementation) == tensor._cdata
    for _ in range(3):
        tensor.add_(1)
    assert _places._version_at(_places._word(tensor._cdata + places.counter) + places.version) == tensor._version == 3


def test_places_that_cannot_be_told_apart(monkeypatch):
    """Samples of one version agree in many places; none is then taken."""
    monkeypatch.setattr(_places, "_samples", lambda: [torch.ones(3), torch.ones(3)])
    assert _places.learn() is None


@pytest.mark.parametrize("error", [ImportError, ValueError])
def test_an_interface_of_another_kind(monkeypatch, error):
    """A later torch may have another version of it, or another name: then every step goes the long way."""

    class Library:
        @staticmethod
        def roundpipe_go_plain_step(*_):
            raise error

    monkeypatch.setattr(_binding.ctypes, "PyDLL", lambda _: Library)
    assert _binding._plain_step.__wrapped__() is None


def test_large_integers_are_torchs_to_refuse():
    """Python multiplies them exactly, and then has no float for the product."""
    twins = Twins(lambda: [torch.ones(3).requires_grad_()])
    twins.train(1)
    for optimizer in twins:
        optimizer.param_groups[0].update(lr=2**600, weight_decay=2**600)
        with pytest.raises(OverflowError):
            optimizer.step()
    assert [state["step"].item() for state in twins.ours.state.values()] == [1]


def test_params_may_be_a_tuple(long_ways):
    twins = Twins(params, lr=0.1)
    twins.train(1)
    for optimizer in twins:
        optimizer.param_groups[0]["params"] = tuple(optimizer.param_groups[0]["params"])
    twins.train(2)
    twins.assert_equal()
    assert len(long_ways) == 3


@pytest.mark.parametrize("which", ["grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
def test_lazily_negated_tensors_are_seen(which):
    """Also one that takes the place of a tensor that was looked at before."""
    twins = Twins(lambda: [torch.linspace(1, 2, 40).requires_grad_()], lr=0.1, amsgrad=True)
    twins.train(2)
    for optimizer in twins:
        (param,) = optimizer.param_groups[0]["params"]
        param.grad = torch.linspace(1, 2, 40)
        if which == "grad":
            param.grad = torch._neg_view(param.grad)
        else:
            optimizer.state[param][which] = torch._neg_view(-optimizer.state[param][which])
    twins.torch.step()
    with pytest.warns(roundpipe_go.FallbackWarning, match="negative view"):
        twins.ours.step()
    twins.assert_equal()


def test_shared_memory_under_foreach():
    """torch's foreach runs one operation over all parameters before the next, which shows where they overlap."""

    def halves() -> list[Tensor]:
        buffer = torch.linspace(-1, 1, 40)
        return [buffer[:30].requires_grad_(), buffer[10:].requires_grad_()]

    twins = Twins(halves, lr=0.1, weight_decay=0.1, foreach=True)
    with pytest.warns(roundpipe_go.FallbackWarning, match="share memory"):
        twins.train(3)
    twins.assert_equal()


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, *([{"weight_decay": 0}] if EXCHANGE else [])], ids=str)
def test_versions_are_torchs(options):
    # torch 2.6 multiplies by 1 where nothing decays.
    twins = Twins(params, lr=0.1, **options)
    twins.train(4)
    for ours, theirs in zip(*(optimizer.param_groups[0]["params"] for optimizer in twins)):
        assert ours._version == theirs._version
    for ours, theirs in zip(*(list(optimizer.state.values()) for optimizer in twins)):
        assert {k: v._version for k, v in ours.items()} == {k: v._version for k, v in theirs.items()}


def test_functional_refuses_leaves_that_record():
    lists = [[torch.ones(3, requires_grad=True)], [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)], [], [torch.tensor(0.0)]]
    options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "lr": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        roundpipe_go.adam(*lists, decoupled_weight_decay=True, **options)
    assert torch.equal(lists[0][0].detach(), torch.ones(3))


def run(code: str) -> tuple[int, str, str]:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    return result.returncode, result.stdout.strip(), result.stderr


FAKE = """
import torch, roundpipe_go
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    roundpipe_go.AdamW([param]).step()
assert roundpipe_go.build_info()["square_root"], "what was found out under the mode would stay"
print("fine")
"""


def test_first_step_under_a_fake_mode():
    """What torch rounds like is found out outside of it. In a process of its own, as it is found out once."""
    status, out, err = run(FAKE)
    assert (status, out) == (0, "fine"), err


MUTATE = """
import sys, threading, time
import torch, roundpipe_go
sys.setswitchinterval(1e-5)
params = [torch.nn.Parameter(torch.randn(64)) for _ in range(50)]
for param in params:
    param.grad = torch.randn(64)
optimizer = roundpipe_go.Adam(params, amsgrad=True)
optimizer.step()
done = threading.Event()

def replace():
    while not done.is_set():
        for param in params:
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                optimizer.state[param][name] = torch.zeros(64)
            param.grad = torch.randn(64)

threads = [threading.Thread(target=replace) for _ in range(2)]
for thread in threads:
    thread.start()
end = time.monotonic() + 4
steps = 0
while time.monotonic() < end:
    optimizer.step()
    steps += 1
done.set()
for thread in threads:
    thread.join()
print("survived", steps > 10)
"""


def test_state_replaced_by_other_threads_meanwhile():
    """Tensors are held from when they are found until the call is over. A crash would be a status below 0."""
    status, out, err = run(MUTATE)
    assert (status, out) == (0, "survived True"), err


def test_steps_of_many_threads_at_once():
    """Optimizers of their own, each with the bits of torch's."""
    results = []

    def train():
        twins = Twins(params, lr=0.1)
        twins.train(20)
        twins.assert_equal()
        results.append(True)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 100
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert results == [True] * 4


@pytest.mark.parametrize("threads", [2, 3])
def test_goroutines_and_torchs_threads_have_the_same_bits(threads):
    """Steps run on the threads of torch's OpenMP where there is one, else on goroutines."""
    native = _binding._module()
    results = []
    for addresses in ((0, 0, 0), _binding.team()):
        native.SetTeam(*addresses)
        twins = Twins(lambda: [torch.linspace(-1, 1, 700_001).requires_grad_(), *params()], lr=0.1)
        roundpipe_go.set_num_threads(threads)
        try:
            twins.train(2)
        finally:
            roundpipe_go.set_num_threads(None)
        twins.assert_equal()
        results.append(twins.params[0].detach().clone())
    assert torch.equal(*results)
