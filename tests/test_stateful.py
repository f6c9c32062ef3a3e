"""Anything that people do to an optimizer, in any order, done to both: equal bits after each action, equal exceptions."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from oracle import TORCH_CLASS, Twins, assert_unchanged, params_of, snapshot

SHAPES = st.sampled_from([(), (0,), (1,), (3,), (17,), (4, 5), (2, 3, 1), (33,)])
SEEDS = st.integers(0, 1 << 16)
BETAS = st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.2, 0.0), (0.99, 0.9999)])
LRS = st.sampled_from([0.0, 1e-3, 0.1, 3.0, torch.tensor(0.01), torch.tensor(0.02, dtype=torch.float64), torch.tensor([0.02])])
DECAYS = st.sampled_from([0, 0.01, 0.5])
MAX_PARAMS = 8


def values(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def saved_and_loaded(state_dict: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class Mirror(RuleBasedStateMachine):
    """Our optimizer and torch's, and whatever belongs to them, one of each."""

    @initialize(
        ours=st.sampled_from(list(TORCH_CLASS)),
        shapes=st.lists(SHAPES, min_size=1, max_size=4),
        seed=SEEDS,
        lr=LRS,
        betas=BETAS,
        weight_decay=DECAYS,
        eps=st.sampled_from([0.0, 1e-8, 1e-3]),
        amsgrad=st.booleans(),
        maximize=st.booleans(),
    )
    def start(self, ours, shapes, seed, **options):
        self.twins = Twins(lambda: [values(s, seed + i).requires_grad_() for i, s in enumerate(shapes)], ours, **options)
        self.schedulers: list[Any] = []

    def both(self, action: Callable[[torch.optim.Optimizer], Any]) -> Any:
        """Does the same to both. What torch refuses we refuse, and have changed nothing; torch is then set to our state."""
        before = snapshot(self.twins.ours)
        results, errors = [], []
        for optimizer in self.twins:
            try:
                results.append(action(optimizer))
                errors.append(None)
            except Exception as error:
                errors.append(error)
        ours, theirs = errors
        assert type(ours) is type(theirs), f"got {ours!r}, want {theirs!r}"
        if ours is None:
            return results
        assert str(ours) == str(theirs)
        assert_unchanged(before)
        self.copy_ours_to_torch()
        return None

    def copy_ours_to_torch(self) -> None:
        with torch.no_grad():
            for got, want in zip(self.twins.params, self.twins.torch_params):
                want.copy_(got)
                self.twins.torch.state.pop(want, None)
                if got in self.twins.ours.state:
                    self.twins.torch.state[want] = copy.deepcopy(self.twins.ours.state[got])

    def group(self, optimizer: torch.optim.Optimizer, index: int) -> dict[str, Any]:
        return optimizer.param_groups[index % len(optimizer.param_groups)]

    def param(self, optimizer: torch.optim.Optimizer, index: int) -> Tensor:
        params = params_of(optimizer)
        return params[index % len(params)]

    @rule(seed=SEEDS, missing=st.integers(0, 255), scale=st.sampled_from([0.0, 1e-20, 1e-3, 1.0, 1e25, float("inf")]))
    def step(self, seed, missing, scale):
        grads = [
            None if missing >> i & 1 and missing >> i & 2 else values(param.shape, seed + i, scale)
            for i, param in enumerate(self.twins.params)
        ]
        self.twins.set_grads(grads)
        self.both(lambda optimizer: optimizer.step())

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none):
        self.both(lambda optimizer: optimizer.zero_grad(set_to_none=set_to_none))

    @rule()
    def step_with_what_is_there(self):
        self.both(lambda optimizer: optimizer.step())

    @rule()
    def step_with_a_closure(self):
        def action(optimizer):
            def closure():
                optimizer.zero_grad()
                loss = sum(param.mul(0.7).sin().sum() for param in params_of(optimizer) if param.requires_grad)
                if isinstance(loss, Tensor):
                    loss.backward()
                return loss

            return optimizer.step(closure)

        results = self.both(action)
        if results is not None and isinstance(results[0], Tensor):
            assert torch.equal(results[0].nan_to_num(), results[1].nan_to_num())

    @precondition(lambda self: len(self.twins.params) < MAX_PARAMS)
    @rule(shape=SHAPES, seed=SEEDS, lr=LRS, betas=BETAS)
    def add_param_group(self, shape, seed, lr, betas):
        group = lambda: {"params": [values(shape, seed).requires_grad_()], "lr": cloned(lr), "betas": betas}  # noqa: E731
        self.both(lambda optimizer: optimizer.add_param_group(group()))
        self.schedulers.clear()  # torch's keep one base lr per group of their beginning

    @rule(index=SEEDS)
    def add_a_parameter_again(self, index):
        self.both(lambda optimizer: optimizer.add_param_group({"params": [self.param(optimizer, index)]}))

    @rule(index=SEEDS, lr=LRS, betas=BETAS, weight_decay=DECAYS, eps=st.sampled_from([0.0, 1e-8, 0.1]), maximize=st.booleans())
    def change_options(self, index, lr, **options):
        self.both(lambda optimizer: self.group(optimizer, index).update(lr=cloned(lr), **options))

    @rule(index=SEEDS, factor=st.sampled_from([0.5, 2.0]))
    def scale_lr_in_place(self, index, factor):
        def action(optimizer):
            self.group(optimizer, index)["lr"] *= factor

        self.both(action)

    @rule(index=SEEDS)
    def switch_amsgrad(self, index):
        """Switched on where there is state, the next step is a KeyError; then it is switched back."""

        def switch(optimizer):
            group = self.group(optimizer, index)
            group["amsgrad"] = not group["amsgrad"]

        self.both(switch)
        if self.both(lambda optimizer: optimizer.step()) is None:
            self.both(switch)

    @rule(index=SEEDS, decoupled=st.booleans())
    def switch_decay(self, index, decoupled):
        self.both(lambda optimizer: self.group(optimizer, index).update(decoupled_weight_decay=decoupled))

    @rule(kind=st.sampled_from(["exponential", "one_cycle"]))
    def make_scheduler(self, kind):
        def make(optimizer):
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            if kind == "exponential":
                return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10_000)

        self.schedulers = self.both(make)

    @precondition(lambda self: self.schedulers)
    @rule()
    def step_schedulers(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the order of steps, which is as random as the rest
            for scheduler in self.schedulers:
                scheduler.step()

    @rule(index=SEEDS, seed=SEEDS)
    def swap_data(self, index, seed):
        """New memory under the same parameter."""

        def action(optimizer):
            param = self.param(optimizer, index)
            param.data = values(param.shape, seed)

        self.both(action)

    @rule(index=SEEDS)
    def freeze_or_thaw(self, index):
        def action(optimizer):
            param = self.param(optimizer, index)
            param.requires_grad_(not param.requires_grad)

        self.both(action)

    @rule(index=SEEDS, count=st.sampled_from([0.0, 0.5, 7.0, 2.0**24 - 1, 2.0**24]))
    def preset_step(self, index, count):
        def action(optimizer):
            state = optimizer.state.get(self.param(optimizer, index))
            if state:
                state["step"].fill_(count)

        self.both(action)

    @rule(form=st.sampled_from([copy.deepcopy, saved_and_loaded]), exchange=st.booleans())
    def save_and_load(self, form, exchange):
        """Into the same optimizers, or each the other's."""
        dicts = [form(optimizer.state_dict()) for optimizer in self.twins]
        for optimizer, state_dict in zip(self.twins, reversed(dicts) if exchange else dicts):
            optimizer.load_state_dict(state_dict)

    @precondition(lambda self: len(self.twins.params) > 1)
    @rule()
    def load_state_of_fewer(self):
        fewer = torch.optim.Adam([torch.ones(1, requires_grad=True)]).state_dict()
        self.both(lambda optimizer: optimizer.load_state_dict(fewer))

    @rule(copier=st.sampled_from([copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))]))
    def replace_by_a_copy(self, copier):
        grads = [param.grad for param in self.twins.params]
        self.twins.ours, self.twins.torch = (copier(optimizer) for optimizer in self.twins)
        self.twins.set_grads(grads)  # deepcopy and pickle differ in keeping them
        self.schedulers.clear()

    @rule(index=SEEDS)
    def forget_state(self, index):
        self.both(lambda optimizer: optimizer.state.pop(self.param(optimizer, index), None))

    @rule()
    def step_with_hooks(self):
        """A hook before changes the gradients, one after the parameters."""

        def action(optimizer):
            def halve(optimizer, args, kwargs):
                for param in params_of(optimizer):
                    if param.grad is not None:
                        param.grad.mul_(0.5)

            def negate(optimizer, args, kwargs):
                with torch.no_grad():
                    for param in params_of(optimizer):
                        param.neg_()

            handles = [optimizer.register_step_pre_hook(halve), optimizer.register_step_post_hook(negate)]
            try:
                optimizer.step()
            finally:
                for handle in handles:
                    handle.remove()

        self.both(action)

    @invariant()
    def equal(self):
        if hasattr(self, "twins"):
            self.twins.assert_equal()
            assert repr(self.twins.ours) == repr(self.twins.torch)


TestMirror = Mirror.TestCase
TestMirror.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


class LongMirror(Mirror):
    """The same at length, each time other actions; a failure prints how to see it again."""


TestLongMirror = pytest.mark.slow(LongMirror.TestCase)
TestLongMirror.settings = settings(TestMirror.settings, max_examples=1500, derandomize=False)
