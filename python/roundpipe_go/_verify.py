"""``python -m roundpipe_go verify``: this machine's torch and ours, step by step, bit by bit."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import _fallback
from .adam import Adam
from .adamw import AdamW

STEPS = 3

_SHAPES: tuple[tuple[int, ...], ...] = ((1023,), (31, 7), (5, 3, 4), (1,), (), (0,))
_LARGE = (300_017,)
"""Enough for the work to be cut over threads; once a row, as torch takes most of the time here."""


@dataclass
class Row:
    """One line of the table: the same kind of parameters under all combinations of flags.

    Attributes:
        name: what kind.
        served: "kernel", or "torch" if torch computed (part of) it.
        runs: how many combinations were tried.
        different: those whose bits differ, in words; empty if all is well.
        reason: why torch computed.
    """

    name: str
    served: str = "kernel"
    runs: int = 0
    different: list[str] = field(default_factory=list)
    reason: str = ""


def _plain(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def _permuted(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return _plain(shape[::-1], generator, dtype).permute(tuple(range(len(shape)))[::-1])


@dataclass(frozen=True)
class _Kind:
    name: str
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[[tuple[int, ...], torch.Generator, torch.dtype], Tensor] = _plain


_KINDS = (
    _Kind("float32"),
    _Kind("float32, l2 decay", options={"weight_decay": 0.1}),
    _Kind("float32, decoupled decay", options={"weight_decay": 0.1, "decoupled": True}),
    _Kind("float32, tensor lr", options={"lr": torch.tensor(1e-3, device="cpu")}),
    _Kind("float32, transposed", make=_permuted),
    _Kind("float64", torch.float64),
    _Kind("float64, decoupled decay", torch.float64, {"weight_decay": 0.1, "decoupled": True}),
    _Kind("complex64", torch.complex64),
    _Kind("complex64, l2 decay", torch.complex64, {"weight_decay": 0.1}),
    _Kind("bfloat16", torch.bfloat16),
    _Kind("float32, fused=True", options={"fused": True}),
)

_FLAGS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("amsgrad", (False, True)),
    ("maximize", (False, True)),
    ("betas", ((0.9, 0.999), (0.4, 0.95))),
)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same bits, any NaN being as good as another."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    different = a.contiguous().view(integers) != b.contiguous().view(integers)
    return not bool((different & ~(a.isnan() & b.isnan())).any()) if different.any() else True


def _difference(kind: _Kind, shapes: Sequence[tuple[int, ...]], options: dict[str, Any]) -> str | None:
    """Trains both optimizers by the same gradients; says where they differ, or returns None."""
    options = dict(options)
    decoupled = options.pop("decoupled", False)
    classes = (torch.optim.AdamW, AdamW) if decoupled else (torch.optim.Adam, Adam)
    generator = torch.Generator().manual_seed(0)
    start = [kind.make(shape, generator, kind.dtype) for shape in shapes]
    both = [[tensor.clone().requires_grad_() for tensor in start] for _ in classes]
    optimizers = [cls(params, **options) for cls, params in zip(classes, both)]
    for _ in range(STEPS):
        for theirs, ours in zip(*both):
            theirs.grad = kind.make(tuple(theirs.shape), generator, kind.dtype)
            ours.grad = theirs.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for i, (theirs, ours) in enumerate(zip(*both)):
        state = optimizers[0].state[theirs]
        pairs = {"param": (theirs.detach(), ours.detach())}
        pairs |= {key: (state[key], optimizers[1].state[ours][key]) for key in state}
        for name, (want, got) in pairs.items():
            if not _equal(want, got):
                return f"tensor {i} of shape {tuple(theirs.shape)}, {name}"
    return None


def verify() -> Iterator[Row]:
    """Compares with ``torch.optim`` over the flags; yields one row after the other, some ten in a few seconds."""
    warned = set(_fallback._warned)
    try:
        for kind in _KINDS:
            row = Row(kind.name)
            for values in itertools.product(*(choices for _, choices in _FLAGS)):
                flags = dict(zip((name for name, _ in _FLAGS), values))
                _fallback._warned.clear()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", _fallback.FallbackWarning)
                    shapes = _SHAPES if row.runs else (_LARGE, *_SHAPES)
                    difference = _difference(kind, shapes, {**kind.options, **flags})
                row.runs += 1
                if difference is not None:
                    row.different.append(f"{flags}: {difference}")
                for reason in _fallback._warned:
                    row.served, row.reason = "torch", reason
            yield row
    finally:
        _fallback._warned |= warned
