"""What arithmetic the installed torch computes with, found out once.

Two things differ between builds and machines: whether products are added with one rounding or two, which torch's CPU
capability decides, and the square root, which comes from oneMKL in the official wheels and is not correctly rounded there.
The second is settled by comparison, and the whole by a trial step, never by the name of a CPU.
"""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _binding, _settings

ARITHMETICS = ("fma", "plain")
SQUARE_ROOTS = ("ieee", "goldschmidt", "library")
"""In the order of their codes in Go, and of preference: the first that equals torch.sqrt is taken."""

_CHUNK = 1 << 20


@dataclass(frozen=True)
class TorchArithmetic:
    """How torch rounds, in the terms of the kernels.

    Attributes:
        arithmetic: "fma" or "plain".
        square_root: "ieee", "goldschmidt", "library"; None if no kernel reproduces torch, which must then compute itself.
        why: one sentence for people.
    """

    arithmetic: str
    square_root: str | None
    why: str


def _bits(tensor: Tensor) -> Tensor:
    """Bit patterns, every NaN as one: payloads carry no meaning."""
    return torch.where(tensor.isnan(), torch.nan, tensor).view(torch.int32)


def _probe() -> Tensor:
    """Every binade sampled, with its edges; denormals, zeros, infinities, negatives and NaN. 132,096 float32."""
    generator = torch.Generator().manual_seed(0)
    mantissa = torch.randint(0, 1 << 23, (256, 512), dtype=torch.int32, generator=generator)
    mantissa[:, :4] = torch.tensor([0, 1, (1 << 23) - 2, (1 << 23) - 1])
    exponent = torch.arange(256, dtype=torch.int32).unsqueeze(1) << 23
    positive = (exponent | mantissa).view(torch.float32).flatten()
    return torch.cat([positive, -positive[::128]])


def _sqrt_equals(x: Tensor, square_root: str) -> bool:
    """Whether the kernels' square root of every x has the bits of torch.sqrt."""
    y = torch.empty_like(x)
    backend = _settings.BACKENDS.index(_settings.available_backends()[-1])
    _binding.sqrt(y.data_ptr(), x.data_ptr(), x.numel(), backend, SQUARE_ROOTS.index(square_root))
    return torch.equal(_bits(y), _bits(torch.sqrt(x)))


def _reproduces_sqrt(square_root: str) -> bool:
    if square_root == "library":
        # torch calls the very same function; the probe shows that it is the same.
        return _binding.library_square_root() is not None and _sqrt_equals(_probe(), square_root)
    if square_root == "goldschmidt" and (
        # It needs RSQRTPS, and the library stands in for it where its intermediate results would be flushed.
        _settings.available_backends() == ("generic",) or _binding.library_square_root() is None
    ):
        return False
    if not _sqrt_equals(_probe(), square_root):
        return False
    # Both formulas scale with powers of four, so [1, 4) stands for all normal numbers: try each of its 2^24.
    first = int(torch.tensor(1.0).view(torch.int32))
    return all(
        _sqrt_equals(torch.arange(i, i + _CHUNK, dtype=torch.int32).view(torch.float32), square_root)
        for i in range(first, first + (1 << 24), _CHUNK)
    )


def _find_square_root() -> str | None:
    """The first square root that equals torch.sqrt."""
    if _settings.get_square_root() == "ieee":
        return "ieee"
    flushing = torch.tensor([2.0**-126]).mul(0.5).item() == 0
    torch.set_flush_denormal(False)
    try:
        # oneMKL 2024.2 may answer a process's first concurrent call with another, less accurate kernel.
        torch.sqrt(torch.ones(64))
        return next((name for name in SQUARE_ROOTS if _reproduces_sqrt(name)), None)
    finally:
        torch.set_flush_denormal(flushing)


@functools.cache
def _detect(setting: str) -> TorchArithmetic:
    if platform.machine() not in ("x86_64", "AMD64"):
        return TorchArithmetic("fma", None, f"the kernels reproduce torch on x86-64, and this is {platform.machine()}")
    capability = torch.backends.cpu.get_cpu_capability()
    arithmetic = "plain" if capability in ("DEFAULT", "NO AVX") else "fma"
    square_root = _find_square_root()
    if square_root is None:
        return TorchArithmetic(arithmetic, None, "no square root of the kernels equals torch.sqrt of this torch and CPU")
    why = {
        "ieee": "torch.sqrt rounds correctly here",
        "goldschmidt": "torch.sqrt is a Goldschmidt iteration on RSQRTPS here",
        "library": "torch.sqrt is oneMKL's vmsSqrt here, which is called tile by tile",
    }[square_root]
    if setting == "ieee":
        why = "asked for; torch.sqrt may differ in the last place"
    return TorchArithmetic(arithmetic, square_root, f"torch's CPU capability is {capability}; {why}")


def torch_arithmetic() -> TorchArithmetic:
    """What this process's torch computes with; found at the first call, which takes about a tenth of a second."""
    return _detect(_settings.get_square_root())

