"""torch's optimizer and ours on equal tensors, compared bit by bit."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

import roundpipe_go

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}

TORCH_CLASS = {roundpipe_go.Adam: torch.optim.Adam, roundpipe_go.AdamW: torch.optim.AdamW}


def ieee_sqrt(x: Tensor, out: Tensor | None = None) -> Tensor:
    """``torch.sqrt`` correctly rounded, as torch's own is not in some builds."""
    with numpy.errstate(invalid="ignore"):
        root = torch.from_numpy(numpy.sqrt(x.detach().contiguous().numpy()))
    return root if out is None else out.copy_(root)


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns of a tensor as integers, flat. Every NaN gives the same pattern: payloads carry no meaning."""
    tensor = tensor.detach().to_dense().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(-1)
    if not flat.is_floating_point():
        return flat.to(torch.int64)
    return torch.where(flat.isnan(), torch.nan, flat).view(_INTEGERS[flat.element_size()])


def _describe(value: Tensor) -> str:
    number = float(value)
    pattern = struct.pack(">d" if value.dtype is torch.float64 else ">f", number).hex()
    return f"{number.hex()} (0x{pattern})"


def _rank(pattern: int, nbytes: int) -> int:
    """The place of a float among its like, so that a difference counts ulps; both zeros have 0."""
    return pattern if pattern >= 0 else -(pattern + (1 << 8 * nbytes - 1))


def assert_equal_bits(got: Tensor, want: Tensor, name: str) -> None:
    """Fails with the place of the first difference and both values as hexadecimal floats and bits."""
    assert got.dtype == want.dtype, f"{name}: got {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{name}: got shape {tuple(got.shape)}, want {tuple(want.shape)}"
    got_bits, want_bits = bits(got), bits(want)
    if torch.equal(got_bits, want_bits):
        return
    wrong = (got_bits != want_bits).nonzero().flatten()
    i = int(wrong[0])
    dense = (got.detach().to_dense(), want.detach().to_dense())
    flat = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in dense]
    g, w = (_describe(t.reshape(-1)[i]) for t in flat)
    ulps = abs(_rank(int(got_bits[i]), got_bits.element_size()) - _rank(int(want_bits[i]), want_bits.element_size()))
    raise AssertionError(f"{name}: {len(wrong)} of {len(got_bits)} differ, first at {i}: got {g}, want {w}, {ulps} ulp apart")


def assert_equal_state(got: dict[str, Any], want: dict[str, Any], name: str) -> None:
    """Compares the state of one parameter: keys, dtypes, shapes, bits."""
    assert list(got) == list(want), f"{name}: got keys {list(got)}, want {list(want)}"
    for key, value in want.items():
        if isinstance(value, Tensor):
            assert isinstance(got[key], Tensor), f"{name}.{key}: got {got[key]!r}, want a tensor"
            assert_equal_bits(got[key], value, f"{name}.{key}")
        else:
            assert got[key] == value, f"{name}.{key}: got {got[key]!r}, want {value!r}"


Snapshot = list[tuple[str, Tensor, Tensor]]
"""Name, tensor, and its values of then."""


def snapshot(optimizer: torch.optim.Optimizer) -> Snapshot:
    """Copies of all that a step may write, with the tensors themselves, for ``assert_unchanged``."""
    tensors = []
    for g, group in enumerate(optimizer.param_groups):
        for p, param in enumerate(group["params"]):
            state = optimizer.state.get(param, {})
            named = [("", param), *((f".{key}", value) for key, value in state.items())]
            tensors += [(f"groups[{g}].params[{p}]{n}", t) for n, t in named if isinstance(t, Tensor) and not t.is_meta]
    return [(name, tensor, tensor.detach().clone()) for name, tensor in tensors]


def assert_unchanged(before: Snapshot) -> None:
    """Fails if a tensor of the snapshot holds other bits than then."""
    for name, tensor, values in before:
        assert_equal_bits(tensor, values, name)


class Twins:
    """Our optimizer and torch's over equal parameters.

    Args:
        make_params: called twice for two equal sets of parameters (or of groups); it must give the same each time.
        ours: our class; torch's is the one of that name.
        options: of both constructors. Tensors among them are cloned, for a scheduler changes them in place.
    """

    def __init__(self, make_params: Callable[[], Any], ours: type = roundpipe_go.AdamW, **options: Any) -> None:
        self.ours = ours(make_params(), **_cloned(options))
        self.torch = TORCH_CLASS[ours](make_params(), **_cloned(options))

    def __iter__(self) -> Iterable[torch.optim.Optimizer]:
        return iter((self.ours, self.torch))

    @property
    def params(self) -> list[Tensor]:
        return params_of(self.ours)

    @property
    def torch_params(self) -> list[Tensor]:
        return params_of(self.torch)

    def set_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Gives both the same values as gradients, in tensors of their own with the strides of the given ones."""
        for params in (self.params, self.torch_params):
            for param, grad in zip(params, grads, strict=True):
                param.grad = None if grad is None else grad.detach().clone()

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """One step of both, then the comparison."""
        self.set_grads(grads)
        for optimizer in self:
            optimizer.step()
        self.assert_equal()

    def train(self, steps: int, seed: int = 0) -> None:
        """Steps with random gradients."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            self.step([randn_like(param, generator) for param in self.params])

    def assert_equal(self) -> None:
        """Fails unless parameters and state have equal bits."""
        for i, (got, want) in enumerate(zip(self.params, self.torch_params, strict=True)):
            assert_equal_bits(got, want, f"params[{i}]")
            assert (got in self.ours.state) == (want in self.torch.state), f"params[{i}]: state on one side only"
            if want in self.torch.state:
                assert_equal_state(self.ours.state[got], self.torch.state[want], f"params[{i}]")

    def assert_equal_errors(self, action: Callable[[torch.optim.Optimizer], Any]) -> BaseException:
        """Does the same to both, expects the same exception, and that ours has changed nothing of what a step writes."""
        before = snapshot(self.ours)
        errors = []
        for optimizer in self:
            try:
                action(optimizer)
            except Exception as error:
                errors.append(error)
            else:
                errors.append(None)
        ours, theirs = errors
        assert theirs is not None, "torch raised nothing"
        assert (type(ours), str(ours)) == (type(theirs), str(theirs)), f"got {ours!r}, want {theirs!r}"
        assert_unchanged(before)
        return ours


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def randn_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Normal random values in the shape, dtype and strides of a tensor."""
    values = torch.empty_like(tensor, requires_grad=False)
    values.copy_(torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator))
    return values


def _cloned(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in options.items()}
