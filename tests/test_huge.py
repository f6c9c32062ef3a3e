"""Lengths beyond 2^31 and 2^32, in bytes and in elements, asked for by ``make test-huge``: some GB of addresses, little memory.

All of a tensor but a few blocks is one block of memory, mapped again and again, so that it has as many addresses as a huge one
without being one. Its values are zero and mean nothing. The blocks that have memory of their own lie where an index that is
too narrow would go wrong: it would update them twice, or not at all, or with another block's gradient.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
import torch
from torch import Tensor

import roundpipe_go
from oracle import assert_equal_bits

pytestmark = [
    pytest.mark.huge,
    pytest.mark.skipif(os.environ.get("ROUNDPIPE_GO_TEST_HUGE") != "1", reason="takes minutes: make test-huge"),
]

BLOCK = 1 << 24  # bytes
OPTIONS = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1, "amsgrad": True, "maximize": True}
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
CTYPE = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MAP_FIXED, PROT_NONE = 0x10, 0


def mapped(address: int | None, nbytes: int, protection: int, flags: int, file: int = -1, offset: int = 0) -> int:
    result = libc.mmap(address, nbytes, protection, flags, file, offset)
    if result == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return result


class Addresses:
    """A tensor of many addresses.

    Args:
        numel, dtype: of the tensor.
        own: the blocks that have memory of their own.
    """

    def __init__(self, numel: int, dtype: torch.dtype, own: list[int]) -> None:
        num_blocks = -(-numel * dtype.itemsize // BLOCK)
        self.nbytes = num_blocks * BLOCK
        self.address = mapped(None, self.nbytes, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        file = os.memfd_create("blocks")
        os.ftruncate(file, (1 + len(own)) * BLOCK)
        for i in range(num_blocks):
            offset = (1 + own.index(i)) * BLOCK if i in own else 0
            flags = mmap.MAP_SHARED | MAP_FIXED
            mapped(self.address + i * BLOCK, BLOCK, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset)
        os.close(file)
        self.tensor = torch.frombuffer((CTYPE[dtype] * numel).from_address(self.address), dtype=dtype)

    def release(self) -> None:
        libc.munmap(self.address, self.nbytes)


@pytest.fixture
def huge():
    """Makes tensors of many addresses and releases them in the end."""
    made = []

    def make(*args) -> Tensor:
        made.append(Addresses(*args))
        return made[-1].tensor

    yield make
    for addresses in made:
        addresses.release()


def own_blocks(numel: int, itemsize: int) -> list[int]:
    """The first block, the last one, and those on both sides of 2^31 and 2^32 bytes and elements and of a wrapped index."""
    last = (numel * itemsize - 1) // BLOCK
    edges = [nbytes // BLOCK for power in (31, 32) for nbytes in (1 << power, itemsize << power)]
    around = {0, 1, 7, last - 1, last, *edges, *(edge - 1 for edge in edges)}
    return sorted(block for block in around if block <= last)


def step(optimizer_class: type, rows: list[dict[str, Tensor]]) -> None:
    """One step over parameters that have a gradient and a state already."""
    optimizer = optimizer_class([row["param"].requires_grad_() for row in rows], **OPTIONS)
    for row in rows:
        row["param"].grad = row["grad"]
        optimizer.state[row["param"]] = {"step": torch.tensor(3.0), **{name: row[name] for name in MOMENTS}}
    optimizer.step()


@pytest.mark.parametrize(
    ("numel", "dtype", "threads", "piece"),
    [
        ((1 << 29) + 77, torch.float32, 2, None),  # 2^31 bytes
        ((1 << 30) + 77, torch.float32, 1, (1 << 20) + 1),  # 2^32 bytes
        ((1 << 31) + 77, torch.float32, 1, None),
        ((1 << 31) + 77, torch.float32, 2, (1 << 20) + 1),
        ((1 << 31) + 77, torch.float64, 2, None),
        ((1 << 32) + 77, torch.float32, 2, None),
    ],
    ids=lambda value: hex(value) if isinstance(value, int) and value > 2 else str(value),
)
def test_every_element_is_updated_once(numel, dtype, threads, piece, huge):
    """In one tensor, or in as many as pieces of that length make."""
    assert_updated_once(numel, dtype, threads, piece, huge)


def test_every_element_is_updated_once_by_each_backend(huge, backend):
    """Which see a span at a time, so that the length matters less."""
    assert_updated_once((1 << 29) + 77, torch.float32, 2, None, huge)


def assert_updated_once(numel, dtype, threads, piece, huge):
    """Compared with torch on the blocks that have memory of their own; the others are written by all threads at once."""
    roundpipe_go.set_num_threads(threads)
    own = own_blocks(numel, dtype.itemsize)
    slices = [slice(i * BLOCK // dtype.itemsize, min((i + 1) * BLOCK // dtype.itemsize, numel)) for i in own]
    tensors = {name: huge(numel, dtype, own) for name in ("param", "grad", *MOMENTS)}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        for part in slices:
            tensor[part].normal_(generator=generator)
            if name.endswith("sq"):
                tensor[part].abs_()

    want = [{name: tensor[part].clone() for name, tensor in tensors.items()} for part in slices]
    length = piece or numel
    pieces = [{name: tensor[i : i + length] for name, tensor in tensors.items()} for i in range(0, numel, length)]
    step(roundpipe_go.AdamW, pieces)
    step(torch.optim.AdamW, want)
    for block, part, theirs in zip(own, slices, want):
        for name, tensor in tensors.items():
            assert_equal_bits(tensor[part], theirs[name], f"block {block}: {name}")
