"""The two optimizers of the stateful tests, and the comparison after each action. What people do to them is elsewhere."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from torch import Tensor

from oracle import TORCH_CLASS, Snapshot, Twins, assert_equal_bits, assert_unchanged, params_of, snapshot

SHAPES = st.sampled_from([(), (0,), (1,), (3,), (17,), (4, 5), (2, 3, 1), (33,)])
SEEDS = st.integers(0, 1 << 16)
BETAS = st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.2, 0.0), (0.99, 0.9999)])
LRS = st.sampled_from([0.0, 1e-3, 0.1, 3.0, torch.tensor(0.01), torch.tensor([0.02])])
DECAYS = st.sampled_from([0, 0.01, 0.5])
EPSS = st.sampled_from([0.0, 1e-8, 1e-3])


_VERSION = re.compile(r"version \d+")  # which in torch also a refused step raises


class UsersError(BaseException):
    """Raised by a hook or a closure of the user; no ``Exception``, as KeyboardInterrupt is none."""


def values(shape: tuple[int, ...], seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * scale


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All parameters and state."""
    for param in params_of(optimizer):
        yield param
        yield from (value for value in optimizer.state.get(param, {}).values() if isinstance(value, Tensor))


class MirrorBase(RuleBasedStateMachine):
    """Our optimizer and torch's, and whatever belongs to them, one of each."""

    def make_twins(self, make_params: Callable[[], list[Tensor]], ours: type, options: dict[str, Any]) -> None:
        self.twins = Twins(make_params, ours, **options)
        self.schedulers: list[Any] = []

    @initialize(
        ours=st.sampled_from(list(TORCH_CLASS)),
        shapes=st.lists(SHAPES, min_size=1, max_size=4),
        seed=SEEDS,
        lr=LRS,
        betas=BETAS,
        weight_decay=DECAYS,
        eps=EPSS,
        amsgrad=st.booleans(),
        maximize=st.booleans(),
    )
    def start(self, ours, shapes, seed, **options):
        self.make_twins(lambda: [values(s, seed + i).requires_grad_() for i, s in enumerate(shapes)], ours, options)

    def both(self, action: Callable[[torch.optim.Optimizer], Any]) -> Any:
        """Does the same to both.

        What torch refuses we refuse, and have changed nothing; torch, which may have, is then set to our state. An
        exception of the user leaves both where it found them.

        Returns:
            What the action returned for each, or None after an exception.
        """
        before = snapshot(self.twins.ours)
        results, errors = [], []
        for optimizer in self.twins:
            try:
                results.append(action(optimizer))
                errors.append(None)
            except (Exception, UsersError, KeyboardInterrupt) as error:
                errors.append(error)
        ours, theirs = errors
        assert type(ours) is type(theirs), f"got {ours!r}, want {theirs!r}"
        if ours is None:
            return results
        assert _VERSION.sub("", str(ours)) == _VERSION.sub("", str(theirs))
        if isinstance(ours, Exception) and not isinstance(ours, ZeroDivisionError):  # which closures and hooks raise
            self.refused(before)
        return None

    def refused(self, before: Snapshot) -> None:
        assert_unchanged(before)
        self.copy_ours_to_torch()

    def copy_ours_to_torch(self) -> None:
        """Whole storages, whatever lies on them in whatever order; state that one has made before it gave up comes or goes."""
        ours, torchs = self.twins.ours.state, self.twins.torch.state
        for got, want in zip(self.twins.params, self.twins.torch_params):
            if got in ours and want not in torchs:
                torchs[want] = copy.deepcopy(ours[got])
            elif got not in ours:
                torchs.pop(want, None)
        for got, want in zip(tensors_of(self.twins.ours), tensors_of(self.twins.torch), strict=True):
            want.untyped_storage().copy_(got.untyped_storage())

    def lr(self, lr: float | Tensor) -> float | Tensor:
        """Of its own for each group; a float under foreach, where torch refuses a tensor in every step."""
        if not isinstance(lr, Tensor):
            return lr
        return lr.item() if self.twins.ours.defaults["foreach"] else lr.clone()

    def group(self, optimizer: torch.optim.Optimizer, index: int) -> dict[str, Any]:
        return optimizer.param_groups[index % len(optimizer.param_groups)]

    def param(self, optimizer: torch.optim.Optimizer, index: int) -> Tensor:
        params = params_of(optimizer)
        return params[index % len(params)]

    @invariant()
    def equal(self):
        if hasattr(self, "twins"):
            self.twins.assert_equal()
            for got, want in zip(tensors_of(self.twins.ours), tensors_of(self.twins.torch), strict=True):
                assert got.stride() == want.stride(), f"got strides {got.stride()}, want {want.stride()}"
            for i, (got, want) in enumerate(zip(self.twins.params, self.twins.torch_params)):
                assert (got.grad is None) == (want.grad is None), f"params[{i}]: a gradient on one side only"
                if want.grad is not None:
                    assert_equal_bits(got.grad.to_dense(), want.grad.to_dense(), f"params[{i}].grad")
            assert repr(self.twins.ours) == repr(self.twins.torch)
