"""Pages of 2 MiB under large tensors: a step walks through memory, and looks up fewer of them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_PAGE = 1 << 21
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_* of <linux/mman.h>; the second came with Linux 6.1

SMALLEST = 2 * _PAGE
"""Bytes below which a tensor is left alone: at most one page would lie within it."""


@functools.cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


def use_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Asks Linux to put large CPU tensors on pages of 2 MiB, in place: values, addresses and sizes stay as they are.

    The optimizers do so with the state that they make or load. Parameters and gradients are the caller's: call this once for
    those of at least 4 MiB, gradients only if they are kept (``zero_grad(set_to_none=False)``). Linux copies the memory once,
    in about a second a gigabyte, and steps over it are then some percent faster. Where it has no such pages nothing happens.

    Args:
        tensors: any; those that are small, sparse, or not on the CPU are passed over.

    Returns:
        The number of bytes that Linux has agreed to, of memory shared by several tensors once, or 0.

    Raises:
        TypeError: not an iterable of tensors.
    """
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"roundpipe_go: tensors is a {type(tensors).__name__}, want several, such as model.parameters()")
    agreed, seen = 0, set()
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"roundpipe_go: tensors has a {type(tensor).__name__}, want tensors, such as model.parameters()")
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.is_cpu or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST or storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        begin = -(-storage.data_ptr() // _PAGE) * _PAGE
        end = (storage.data_ptr() + storage.nbytes()) // _PAGE * _PAGE
        if _madvise()(begin, end - begin, _HUGEPAGE) == 0:
            _madvise()(begin, end - begin, _COLLAPSE)  # now; without it, in the course of minutes
            agreed += end - begin
    return agreed
