"""What the parity tests run on, as data: options, tensors, special values.

A case is one choice per dimension. The default selection covers every pair of choices; the full product is behind ``slow``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import roundpipe_go

SERIAL_BELOW = 1 << 18
"""``serialBelow`` of goadam, in elements: a smaller step runs on the calling thread alone, where torch has no team to lend."""

ROW_ELEMENTS = 1 << 9
"""``rowElements`` of goadam: so does a step whose tensors have fewer elements on average."""

MAX_SPAN = 1 << 15
"""``maxSpan`` of goadam, in elements: a longer tensor is cut."""

DECAYS: dict[str, tuple[type, dict[str, Any]]] = {
    "none": (roundpipe_go.Adam, {"weight_decay": 0}),
    "l2": (roundpipe_go.Adam, {"weight_decay": 0.03}),
    "decoupled": (roundpipe_go.AdamW, {"weight_decay": 0.03}),
}

VARIANTS = [
    (f"{decay}{'_amsgrad' * amsgrad}{'_maximize' * maximize}", *(DECAYS[decay]), {"amsgrad": amsgrad, "maximize": maximize})
    for decay, amsgrad, maximize in itertools.product(DECAYS, (False, True), (False, True))
]
"""The kernels' variants: name, class, options of the decay, the other options."""

LRS = {
    "float": 1e-3,
    "tensor": torch.tensor(1e-3),
    **(
        {"one_element": torch.tensor([1e-3])} if hasattr(sys.modules["torch.optim.optimizer"], "_to_scalar") else {}
    ),  # torch > 2.6
    "float64_tensor": torch.tensor(1e-3, dtype=torch.float64),
}

# lerp computes from the end when 1 - beta1 >= 0.5. "zero" falls back for the sake of its zeros' signs.
BETAS = {
    "usual": (0.9, 0.999),
    "zero": (0.0, 0.0),
    "beta2_zero": (0.01, 0.0),
    "from_end": (0.3, 0.9999),
    "at_half": (0.5, 0.95),
    "close_to_one": (0.9999, 0.9999),
}

EPSS = {"0": 0.0, "1e-8": 1e-8, "1e-3": 1e-3}


def _values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=generator)


def _cut(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    def make() -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [_values(shape, dtype, generator).requires_grad_() for shape in shapes]

    return make


def _mixed() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(n,) for n in (0, 1, 2, 3, 7, 8, 9, 31, 33, 100, 1023)] + [(), (3, 5, 7), (2, 0, 4), (17, 19)]
    dtypes = (torch.float32, torch.complex64)
    return [_values(shape, dtype, generator).requires_grad_() for shape in shapes for dtype in dtypes]


TENSORS: dict[str, Callable[[], list[Tensor]]] = {
    # Every length around every vector width, packed together; the first one is there for the average.
    "lengths": _cut([(600_001,), *((n,) for n in range(1025))], torch.float32),
    # Spans that end in every way: cut many times, cut once with a short rest, just not cut, and scraps between.
    "long": _cut([(SERIAL_BELOW + 77,), (3,), (MAX_SPAN + 1,), (MAX_SPAN,), (), (257, 511)], torch.float32),
    "long_complex": _cut([(SERIAL_BELOW // 2 + 33,), (5,)], torch.complex64),
    "mixed": _mixed,
}


@dataclass(frozen=True)
class Case:
    """One choice in each dimension, by name."""

    decay: str
    amsgrad: bool
    maximize: bool
    lr: str
    betas: str
    eps: str
    foreach: bool | None
    threads: int
    tensors: str

    @property
    def desc(self) -> str:
        flags = "_amsgrad" * self.amsgrad + "_maximize" * self.maximize + "_foreach" * bool(self.foreach)
        return f"{self.tensors}/{self.decay}{flags}/lr={self.lr}/betas={self.betas}/eps={self.eps}/threads={self.threads}"

    @property
    def falls_back(self) -> bool:
        """Whether torch computes some of it: all if beta1 is 0, complex tensors that decay, scalars under a float64 lr."""
        complex_decay = self.decay != "none" and self.tensors in ("mixed", "long_complex")
        scalar_decay = self.decay.startswith("decoupled") and self.lr == "float64_tensor" and self.tensors in ("mixed", "long")
        return self.betas == "zero" or complex_decay or scalar_decay

    @property
    def ours(self) -> type:
        return DECAYS[self.decay][0]

    @property
    def options(self) -> dict[str, Any]:
        return {
            **DECAYS[self.decay][1],
            "amsgrad": self.amsgrad,
            "maximize": self.maximize,
            "lr": LRS[self.lr],
            "betas": BETAS[self.betas],
            "eps": EPSS[self.eps],
            "foreach": self.foreach,
        }


DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "decay": tuple(DECAYS),
    "amsgrad": (False, True),
    "maximize": (False, True),
    "lr": tuple(LRS),
    "betas": tuple(BETAS),
    "eps": tuple(EPSS),
    "foreach": (None, True),
    "threads": (1, 2, 3, 7),
    "tensors": tuple(TENSORS),
}


def allowed(case: Case) -> bool:
    """torch's constructor refuses a tensor lr with foreach."""
    return not (case.foreach and case.lr != "float")


def product() -> list[Case]:
    """Every case over the small tensors: threads make no difference there."""
    dimensions = {**DIMENSIONS, "threads": (1,), "tensors": ("mixed",)}
    return [case for case in (Case(*choices) for choices in itertools.product(*dimensions.values())) if allowed(case)]


def pairwise() -> list[Case]:
    """A few cases in which every possible pair of choices occurs, found greedily and always the same."""
    candidates = [case for case in (Case(*choices) for choices in itertools.product(*DIMENSIONS.values())) if allowed(case)]
    generator = torch.Generator().manual_seed(3)
    candidates = [candidates[i] for i in torch.randperm(len(candidates), generator=generator)[:4000]]
    pairs = {case: frozenset(itertools.combinations(vars(case).items(), 2)) for case in candidates}
    missing = frozenset().union(*pairs.values())
    selection = []
    while missing:
        best = max(candidates, key=lambda case: len(pairs[case] & missing))
        selection.append(best)
        missing -= pairs[best]
    return sorted(selection, key=lambda case: case.desc)
