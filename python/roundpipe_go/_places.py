"""Where in memory torch keeps the facts of a tensor that no C interface tells: found by comparing samples."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 8
_IMPLEMENTATION_BYTES = 184
"""Searched of a tensor's implementation, which takes that much of the heap."""
_COUNTER_BYTES = 32
"""Searched of a version counter, which takes that much of the heap."""


class Places(NamedTuple):
    """Offsets in bytes, as pybind/tensor.c takes them.

    Attributes:
        implementation: of the pointer to torch's implementation, in a tensor's Python object.
        keys: of the set of dispatch keys, in the implementation.
        counter: of the pointer to the version counter, in the implementation.
        version: of the version, in the counter.
        plain: the keys of a dense CPU tensor, with nothing lazy and nothing wrapped.
    """

    implementation: int
    keys: int
    counter: int
    version: int
    plain: int


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _version_at(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


def _keys(tensor: Tensor) -> int:
    return int(torch._C._dispatch_keys(tensor).raw_repr())


def _only(offsets: Iterable[int], agrees: Callable[[int], bool]) -> int:
    """The one offset that agrees.

    Raises:
        LookupError: none does, or several do.
    """
    found = [offset for offset in offsets if agrees(offset)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} places agree")
    return found[0]


def _samples() -> list[Tensor]:
    """Tensors that differ in keys, versions and history."""
    plain = [torch.ones(3, device="cpu"), torch.nn.Parameter(torch.ones(2, 2, device="cpu")), torch.tensor(1.0, device="cpu")]
    plain += [torch.ones(0, device="cpu", dtype=torch.float64), torch.ones(5, device="cpu", requires_grad=True)]
    for times, tensor in enumerate(plain, start=1):
        for _ in range(31 * times):
            torch.autograd.graph.increment_version(tensor)
    other = [torch._neg_view(torch.ones(3, device="cpu")), torch.ones(3, device="cpu", dtype=torch.complex64).conj()]
    other += [torch.ones(3, device="meta"), plain[4].mul(2)]
    return plain + other


def learn() -> Places | None:
    """Finds the places in this torch, or None where one is not to be told apart."""
    with torch.inference_mode(False), torch.enable_grad():
        samples = _samples()
        with torch.inference_mode():
            inference = torch.ones(3, device="cpu")
    try:
        size = min(type(tensor).__basicsize__ for tensor in samples)
        words = range(2 * _WORD, size, _WORD)  # after the reference count and the type
        everyone = [*samples, inference]
        implementation = _only(words, lambda at: all(_word(id(t) + at) == t._cdata for t in everyone))
        inside = range(0, _IMPLEMENTATION_BYTES, _WORD)
        keys = _only(inside, lambda at: all(_word(t._cdata + at) == _keys(t) for t in everyone))
        # Views share the counter, .data does not. Both share the storage.
        relatives = [(t, t.detach(), t.data) for t in samples]
        counter = _only(
            inside,
            lambda at: all(_word(t._cdata + at) == _word(v._cdata + at) != _word(d._cdata + at) for t, v, d in relatives),
        )
        version = _only(
            range(0, _COUNTER_BYTES, 4),
            lambda at: all(_version_at(_word(t._cdata + counter) + at) == t._version for t in samples),
        )
    except LookupError:
        return None
    return Places(implementation, keys, counter, version, _keys(samples[0]))
