"""Counts the steps that are taken in Go, by either way, so that no test compares torch with torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from roundpipe_go import _binding, _descriptors
from roundpipe_go._torch_arithmetic import torch_arithmetic


@contextlib.contextmanager
def native_steps() -> Iterator[list[torch.dtype]]:
    """Collects the dtypes of the native steps, one entry for each that was taken.

    Not those by which torch's arithmetic is found out.
    """
    for dtype in _binding.DTYPES:
        torch_arithmetic(dtype)
    found: list[torch.dtype] = []
    step, plain_step = _binding.step, _binding.plain_step()

    def counted(calls) -> int:
        unserved = step(calls)
        if unserved == 0:
            found.extend(_binding.DTYPES[call[4]] for call in calls)
        return unserved

    def counted_plain(key, param_groups, *arguments) -> bool:
        taken = plain_step(key, param_groups, *arguments)
        grads = [param for group in param_groups for param in group["params"] if param.grad is not None]
        if taken and grads:
            found.append(_descriptors.ELEMENTS[grads[0].dtype])
        return taken

    with (
        mock.patch.object(_binding, "step", counted),
        mock.patch.object(_binding, "plain_step", return_value=plain_step and counted_plain),
    ):
        yield found
