"""What arithmetic the installed torch computes with, found out once.

Two things differ between builds and machines: whether products are added with one rounding or two, which torch's CPU
capability decides, and the square root, which comes from oneMKL in the official wheels and is not correctly rounded there.
The second is settled by comparison, and the whole by a trial step, never by the name of a CPU.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _binding, _descriptors, _fallback, _settings

ARITHMETICS = ("fma", "plain")
SQUARE_ROOTS = ("ieee", "goldschmidt", "newton", "library")
"""In the order of their codes in Go, and of preference: the first that equals torch.sqrt is taken."""

_CANDIDATES = {torch.float32: SQUARE_ROOTS, torch.float64: ("ieee", "library")}
"""The CPU's estimates, from which the others start, are of float32."""

_ESTIMATED = {"goldschmidt": "avx2", "newton": "avx512"}
"""Square roots that start from an estimate of the CPU's, and the first backend to have it."""

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
_BITS_OF_ONE = 0x3F800000
_BLOCK, _SQRT_BLOCK = 1 << 14, 1 << 10
"""In elements: torch cuts none of this over threads, of its square root less than of other operations. They may be busy, and in a
forked child they are not there, which nobody can tell where this package is imported only after the fork."""


@dataclass(frozen=True)
class TorchArithmetic:
    """How torch rounds the numbers of one dtype, in the terms of the kernels.

    Attributes:
        arithmetic: "fma" or "plain".
        square_root: "ieee", "goldschmidt", "newton" or "library"; None if no kernel reproduces torch, which must then
            compute itself.
        why: one sentence for people.
    """

    arithmetic: str
    square_root: str | None
    why: str


def _bits(tensor: Tensor) -> Tensor:
    """Bit patterns, every NaN as one: payloads carry no meaning."""
    return torch.where(tensor.isnan(), torch.nan, tensor).view(_INTEGERS[tensor.dtype])


def _probe(dtype: torch.dtype) -> Iterator[Tensor]:
    """Every binade sampled, with its edges; denormals, zeros, infinities, negatives and NaN. 132,096 float32, 528,749 float64.

    Those of float64, of which no binade can be tried as a whole, have the roots that are hardest to round as well. They come in
    blocks.
    """
    width, exponents, samples = (23, 256, 512) if dtype is torch.float32 else (52, 2048, 256)
    integers = _INTEGERS[dtype]
    generator = torch.Generator().manual_seed(0)
    for some in torch.split(torch.arange(exponents, dtype=integers, device="cpu"), _BLOCK // samples):
        shape = len(some), samples
        mantissa = torch.randint(0, 1 << width, shape, dtype=integers, generator=generator, device="cpu")
        mantissa[:, :4] = torch.tensor([0, 1, (1 << width) - 2, (1 << width) - 1], dtype=integers, device="cpu")
        positive = (some.unsqueeze(1) << width | mantissa).view(dtype).flatten()
        yield positive
        yield -positive[::128]
    if dtype is torch.float64:
        yield torch.tensor(_hardest(), dtype=dtype, device="cpu")


def _hardest() -> list[float]:
    """Doubles in [1, 4) with roots next to the middle between two doubles, where one that is only nearly right errs.

    Such a middle is an odd z of 54 bits in units of half the last place. With z*z = x*2**n + c for a small c, the root of
    x*2**n is z - c/2z. There is a z for every n and every c that is 1 modulo 8; it is found bit by bit.
    """
    found = []
    for n, unit in ((54, 2.0**-52), (55, 2.0**-51)):  # for x in [1, 2) and in [2, 4)
        for c in range(-1023, 1024, 8):
            z = 1
            for bit in range(3, n):
                if (z * z - c) >> bit & 1:
                    z += 1 << (bit - 1)
            for root in (z, -z):
                x = (root % (1 << n - 1) | 1 << 53) ** 2 - c
                if x % (1 << n) == 0 and 1 << 52 <= x >> n < 1 << 53:
                    found.append((x >> n) * unit)
    return found


def _kernel_sqrt(x: Tensor, square_root: str, y: Tensor) -> None:
    """Sets y to the kernels' square root of every x."""
    backend = _settings.BACKENDS.index(_settings.available_backends()[-1])
    code = SQUARE_ROOTS.index(square_root)
    _binding.sqrt(y.data_ptr(), x.data_ptr(), x.numel(), dtype=x.dtype, backend=backend, square_root=code)


def _in_sqrt_blocks(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(x, _SQRT_BLOCK), torch.split(y, _SQRT_BLOCK)))


def _sqrt_equals(x: Tensor, square_root: str) -> bool:
    """Whether the kernels' square root of a block has the bits of torch.sqrt."""
    ours, theirs = torch.empty_like(x), torch.empty_like(x)
    _kernel_sqrt(x, square_root, ours)
    for some, roots in _in_sqrt_blocks(x, theirs):
        torch.sqrt(some, out=roots)
    return torch.equal(_bits(ours), _bits(theirs))


def _equals_on_probe(square_root: str, dtype: torch.dtype) -> bool:
    return all(_sqrt_equals(x, square_root) for x in _probe(dtype))


def _equals_everywhere(square_root: str) -> bool:
    """The same on all 2^24 float32 in [1, 4). The formulas scale with powers of four, so they stand for all normal numbers."""
    bits = torch.arange(_BITS_OF_ONE, _BITS_OF_ONE + _BLOCK, dtype=torch.int32, device="cpu")
    x = bits.view(torch.float32)
    ours, theirs = torch.empty_like(x), torch.empty_like(x)  # new memory for each block would take thrice as long as all the rest
    blocks = _in_sqrt_blocks(x, theirs)
    for _ in range(0, 1 << 24, _BLOCK):
        _kernel_sqrt(x, square_root, ours)
        for some, roots in blocks:
            torch.sqrt(some, out=roots)
        if not torch.equal(ours.view(torch.int32), theirs.view(torch.int32)):
            return False
        bits += _BLOCK
    return True


def _reproduces_sqrt(square_root: str, dtype: torch.dtype) -> bool:
    if square_root == "library":
        # torch calls the very same function; the probe shows that it is the same.
        return _binding.library_square_root(dtype) and _equals_on_probe(square_root, dtype)
    if square_root in _ESTIMATED and (
        # The CPU must have the estimate, and the library stands in where small intermediate results would be flushed.
        _ESTIMATED[square_root] not in _settings.available_backends() or not _binding.library_square_root(dtype)
    ):
        return False
    return _equals_on_probe(square_root, dtype) and (dtype is torch.float64 or _equals_everywhere(square_root))


def _find_square_root(dtype: torch.dtype) -> str | None:
    """The first square root that equals torch.sqrt."""
    # oneMKL 2024.2 may answer a process's first concurrent call with another, less accurate kernel: warm it up.
    torch.sqrt(torch.ones(64, dtype=dtype, device="cpu"))
    return next((name for name in _CANDIDATES[dtype] if _reproduces_sqrt(name, dtype)), None)


def _trial_equals(dtype: torch.dtype, arithmetic: str, square_root: str, **options: Any) -> bool:
    """Whether two steps of a few hundred elements have the bits of torch's own function."""
    options = {"amsgrad": True, "maximize": False, "eps": 1e-8, "lr": 1e-3, **options}
    generator = torch.Generator().manual_seed(1)
    param, grad = torch.randn(2, 331, dtype=dtype, generator=generator, device="cpu")
    ours = [param, grad, *(torch.zeros_like(param) for _ in range(3)), torch.zeros((), dtype=torch.float32, device="cpu")]
    theirs = [tensor.clone() for tensor in ours]
    for _ in range(2):
        *tensors, step = ours
        table = _descriptors.Table(dtype)
        group = table.add_group(_descriptors.next_step(step), **options)
        table.add_row(tensors, step, group)
        call = table.call(
            threads=1,
            backend=_settings.BACKENDS.index(_settings.get_backend()),
            arithmetic=ARITHMETICS.index(arithmetic),
            square_root=SQUARE_ROOTS.index(square_root),
        )
        if _binding.step([call]):
            return False
        _fallback.torch_adam(tuple([tensor] for tensor in theirs), options)
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(ours, theirs))


def _trial(dtype: torch.dtype, arithmetic: str, square_root: str) -> bool:
    """A last look before any user's tensor is touched: another build of torch may round where the known ones do not."""
    return all(
        _trial_equals(
            dtype, arithmetic, square_root, beta1=beta1, beta2=0.999, weight_decay=0.1, decoupled_weight_decay=decoupled
        )
        for beta1 in (0.9, 0.3)
        for decoupled in (False, True)
    )


_WHY = {
    "ieee": "torch.sqrt rounds correctly here",
    "goldschmidt": "torch.sqrt is a Goldschmidt iteration on RSQRTPS here",
    "newton": "torch.sqrt is a Newton step on VRSQRT14PS here",
    "library": "torch.sqrt is oneMKL's {} here, which is called tile by tile",
}


@functools.cache
def _detect(setting: str, dtype: torch.dtype) -> TorchArithmetic:
    capability = torch.backends.cpu.get_cpu_capability()
    arithmetic = "plain" if capability in ("DEFAULT", "NO AVX") else "fma"
    if platform.machine() not in ("x86_64", "AMD64"):
        return TorchArithmetic(arithmetic, None, f"torch's bits are known for x86-64, and this is {platform.machine()}")
    if setting == "ieee":
        return TorchArithmetic(arithmetic, "ieee", f"torch's CPU capability is {capability}; a correct square root was asked for")
    if _binding.forked():
        return TorchArithmetic(arithmetic, None, _binding.FORKED)
    with _binding.one_mkl_thread():
        return _compare(dtype, arithmetic, capability)


def _compare(dtype: torch.dtype, arithmetic: str, capability: str) -> TorchArithmetic:
    """Finds the square root by torch's own operations, and tries a step with it."""
    smallest = torch.tensor([2.0**-126], dtype=torch.float32, device="cpu")
    flushing = smallest.mul(0.5).item() == 0
    torch.set_flush_denormal(False)
    try:
        square_root = _find_square_root(dtype)
        if square_root is None:
            return TorchArithmetic(arithmetic, None, "no square root of the kernels equals torch.sqrt of this torch and CPU")
        if not _trial(dtype, arithmetic, square_root):
            return TorchArithmetic(arithmetic, None, "a trial step has other bits than this torch's; please report it")
    finally:
        torch.set_flush_denormal(flushing)
    why = _WHY[square_root].format(_binding.LIBRARY_FUNCTIONS[dtype])
    return TorchArithmetic(arithmetic, square_root, f"torch's CPU capability is {capability}; {why}")


def torch_arithmetic(dtype: torch.dtype = torch.float32, setting: str | None = None) -> TorchArithmetic:
    """What this process's torch computes with in float32 or float64; found at the first call, in a tenth of a second.

    Args:
        dtype: of the elements.
        setting: "auto" or "ieee"; None takes the one in force.
    """
    return _detect(setting or _settings.get_square_root(), dtype)
