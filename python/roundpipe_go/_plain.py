"""The short way of a step: one native call for all of it, where everything is plain.

Plain are dense CPU tensors of one precision, with their state, in groups whose options are numbers that the kernels serve;
``pybind/step.c`` looks at them. It takes a tenth of the time of ``_step.Step``, which knows all other cases and their reasons.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim import Optimizer

from . import _binding
from ._settings import in_force
from ._step import KNOWN, tracing


@functools.cache
def _has_accelerator() -> bool:
    """Whether a step could be captured into an accelerator's graph, which torch looks at in each step, in some microseconds."""
    return torch.accelerator.current_accelerator(check_available=True) is not None


def _undisguised(function: Any) -> Any:
    """The function that Dynamo, when it is loaded, wraps in torch's classes themselves."""
    return getattr(function, "_torchdynamo_orig_callable", function)


_INIT_GROUPS = frozenset(_undisguised(cls._init_group) for cls in (torch.optim.Adam, torch.optim.AdamW))


def _init_group_is_torchs(optimizer: Optimizer) -> bool:
    """Whether ``_init_group`` need not be called for a state that is there."""
    return _undisguised(getattr(optimizer._init_group, "__func__", None)) in _INIT_GROUPS  # type: ignore[attr-defined]


def step_plain(optimizer: Optimizer) -> bool:
    """Takes the whole step by one native call.

    Returns:
        False if it is for ``Step`` to take. Nothing was changed then.
    """
    if tracing():
        return False
    native = _binding.plain_step()
    if native is None or not _init_group_is_torchs(optimizer):
        return False
    if _has_accelerator():
        optimizer._accelerator_graph_capture_health_check()
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return False
    threads, backend, square_root = in_force()
    return native(id(optimizer), optimizer.param_groups, optimizer.state, KNOWN[square_root], threads, backend)
