"""Anything that people do to an optimizer, in any order, done to both: equal bits after each action, equal exceptions."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import precondition, rule
from torch import Tensor

from mirror import BETAS, DECAYS, EPSS, LRS, SEEDS, SHAPES, MirrorBase, values
from mirror_memory import MemoryRules
from oracle import params_of

MAX_PARAMS = 8


def saved_and_loaded(state_dict: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class Mirror(MirrorBase):
    """Ordinary use: all of it in Go, for a fallback's warning is an error in the tests."""

    @rule(seed=SEEDS, missing=st.integers(0, 255), scale=st.sampled_from([0.0, 1e-20, 1e-3, 1.0, 1e25, float("inf")]))
    def step(self, seed, missing, scale):
        grads = [
            None
            if missing >> i & 1 and missing >> i & 2
            else torch.empty_like(param).copy_(values(param.shape, seed + i, scale, param.dtype))
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
        group = lambda: {"params": [values(shape, seed).requires_grad_()], "lr": self.lr(lr), "betas": betas}  # noqa: E731
        self.both(lambda optimizer: optimizer.add_param_group(group()))
        self.schedulers.clear()  # torch's keep one base lr per group of their beginning

    @rule(index=SEEDS)
    def add_a_parameter_again(self, index):
        self.both(lambda optimizer: optimizer.add_param_group({"params": [self.param(optimizer, index)]}))

    @rule(index=SEEDS, lr=LRS, betas=BETAS, weight_decay=DECAYS, eps=EPSS, maximize=st.booleans())
    def change_options(self, index, lr, **options):
        self.both(lambda optimizer: self.group(optimizer, index).update(lr=self.lr(lr), **options))

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
            param.data = values(param.shape, seed, dtype=param.dtype)

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
        grads = [None if param.grad is None else param.grad.detach().clone() for param in self.twins.params]
        self.twins.set_grads([None] * len(grads))
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
                        param.grad = param.grad * 0.5  # not in place: it may be the parameter's memory, and the step be refused

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


class WideMirror(MemoryRules, Mirror):
    """Anything else as well, also what torch computes and what it refuses."""


SHORT = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(SHORT, max_examples=1500, derandomize=False)  # a failure prints how to see it again
whatever_computes = pytest.mark.filterwarnings("ignore")

TestMirror = Mirror.TestCase
TestMirror.settings = SHORT

TestWideMirror = whatever_computes(WideMirror.TestCase)
TestWideMirror.settings = settings(SHORT, max_examples=30)


class LongMirror(Mirror):
    """The same at length, each time other actions."""


class LongWideMirror(WideMirror):
    """Likewise."""


TestLongMirror = pytest.mark.slow(LongMirror.TestCase)
TestLongMirror.settings = LONG

TestLongWideMirror = whatever_computes(pytest.mark.slow(LongWideMirror.TestCase))
TestLongWideMirror.settings = settings(LONG, max_examples=2000)
