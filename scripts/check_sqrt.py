"""Compares the square root that was chosen here with torch.sqrt over all 2^31 non-negative float32, Inf and NaN included."""

from __future__ import annotations

import sys

import torch
from tqdm import tqdm

from roundpipe_go import _torch_arithmetic

BLOCK = 1 << 20


def main() -> int:
    """Returns the exit status: 1 if a value differs."""
    arithmetic = _torch_arithmetic.torch_arithmetic()
    print(arithmetic.why)
    if arithmetic.square_root is None:
        return 1
    different = 0
    for first in tqdm(range(0, 1 << 31, BLOCK), unit="Mi values", mininterval=1):
        x = torch.arange(first, first + BLOCK, dtype=torch.int64).to(torch.int32).view(torch.float32)
        ours, theirs = torch.empty_like(x), torch.sqrt(x)
        _torch_arithmetic._kernel_sqrt(x, arithmetic.square_root, ours)
        wrong = (ours.view(torch.int32) != theirs.view(torch.int32)) & ~(ours.isnan() & theirs.isnan())
        if wrong.any():
            if different == 0:
                i = int(wrong.nonzero()[0])
                print(f"x = {float(x[i]).hex()}: got {float(ours[i]).hex()}, torch {float(theirs[i]).hex()}")
            different += int(wrong.sum())
    print(f"{arithmetic.square_root}: {different} of 2^31 values differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
