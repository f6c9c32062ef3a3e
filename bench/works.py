"""What is timed: the tensors of a step, and how they are given to the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]

LR = 1e-3
COSINE_STEPS = 1000


@dataclass(frozen=True)
class Work:
    """Parameters, and the way they are stepped.

    Attributes:
        name: as in the tables and for --work.
        shapes: one a parameter.
        groups: number of parameter groups over which the parameters are dealt.
        cosine: lr follows a cosine, another value each step; else it is constant.
        in_backward: each parameter has an optimizer of its own, called as soon as its gradient is there.
        sweep: a point of a plot, not a row of the tables.
    """

    name: str
    shapes: tuple[Shape, ...]
    groups: int = 1
    cosine: bool = False
    in_backward: bool = False
    sweep: bool = False

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def lr(self, step: int) -> float:
        if not self.cosine:
            return LR
        return LR * 0.5 * (1 + math.cos(math.pi * (step % COSINE_STEPS) / COSINE_STEPS))

    def params(self) -> list[Tensor]:
        """Makes the parameters, the same values each time."""
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(shape, generator=generator).requires_grad_() for shape in self.shapes]

    def grads(self) -> list[Tensor]:
        """Makes the gradients, the same values each time."""
        generator = torch.Generator().manual_seed(2)
        return [torch.randn(shape, generator=generator) for shape in self.shapes]


def gpt2_small() -> Iterator[Shape]:
    width = 768
    yield from ((50257, width), (1024, width))
    for _ in range(12):
        for outputs, inputs in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)):
            yield from ((outputs, inputs), (outputs,))
        yield from ((width,),) * 4  # two layer norms
    yield from ((width,),) * 2


def resnet50() -> Iterator[Shape]:
    def convolution(outputs: int, inputs: int, kernel: int) -> Iterator[Shape]:
        yield from ((outputs, inputs, kernel, kernel), (outputs,), (outputs,))  # with its batch norm

    yield from convolution(64, 3, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(width, inputs, 1)
            yield from convolution(width, width, 3)
            yield from convolution(4 * width, width, 1)
            if block == 0:
                yield from convolution(4 * width, inputs, 1)
            inputs = 4 * width
    yield from ((1000, 2048), (1000,))


MI = 1 << 20

ROWS = (
    Work("1,000", ((1000,),)),
    Work("100,000", ((100_000,),)),
    Work("1 Mi", ((MI,),)),
    Work("4 Mi", ((4 * MI,),)),
    Work("64 Mi", ((64 * MI,),)),
    Work("2,000 x 64", ((64,),) * 2000),
    Work("2,000 x 1,000", ((1000,),) * 2000),
    Work("10,000 x 16", ((16,),) * 10_000),
    Work("GPT-2 small", tuple(gpt2_small())),
    Work("ResNet-50", tuple(resnet50())),
    Work("LoRA 256 x 16x1,024", ((16, 1024),) * 256),
    Work("300 groups x 10,000", ((10_000,),) * 300, groups=300),
    Work("2,000 x 1,000, cosine lr", ((1000,),) * 2000, cosine=True),
    Work("in backward, 100 x 100,000", ((100_000,),) * 100, in_backward=True),
)

# The sizes of the plots that no row has.
ELEMENTS = tuple(Work(f"elements {n:,}", ((n,),), sweep=True) for n in (10**e for e in range(2, 9)))
TENSORS = tuple(Work(f"tensors {n:,}", ((1000,),) * n, sweep=True) for n in (1, 10, 100, 1000, 5000, 20_000))
