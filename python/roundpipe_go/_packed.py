"""The short way of a step that is plain all over: float32, contiguous, with its state, every group's options served.

It takes a tenth of the time of ``_step.Step``, which knows all other cases and their reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import _binding
from ._step import CONSTANTS, Kernels, Options, tracing, unserved_options

_EXP_AVG_SQ = 2  # among the written tensors of a parameter; torch writes it twice, and its version says so
_written: WeakKeyDictionary[Optimizer, list[list[Tensor]]] = WeakKeyDictionary()
"""What the last step of an optimizer has written, group by group: it need not be looked at as closely again."""


def _init_group_is_torchs(optimizer: Optimizer) -> bool:
    """Whether ``_init_group`` need not be called for a state that is there. Dynamo wraps it, in torch's classes themselves."""
    function = getattr(optimizer._init_group, "__func__", None)  # type: ignore[attr-defined]
    return function is torch.optim.Adam._init_group or function is torch.optim.AdamW._init_group


def step_packed(optimizer: Optimizer, options_of: Callable[[dict[str, Any]], Options]) -> bool:
    """Takes the whole step by one native call.

    Args:
        optimizer: of ours.
        options_of: gives the options of one of its groups.

    Returns:
        False if it is for ``Step`` to take. Nothing was changed then.
    """
    if tracing() or _binding.forked() or not _init_group_is_torchs(optimizer):
        return False
    pack = _binding.packer()
    if pack is None:
        return False
    kernels = Kernels(torch.float32)
    if kernels.unserved is not None:
        return False
    table, cursor, grads, written_by_group = kernels.table, 0, [], []
    before = _written.get(optimizer, [])
    for i, group in enumerate(optimizer.param_groups):
        options = options_of(group)
        # With foreach torch goes through all parameters by one operation after the other, which shows where they overlap.
        if isinstance(options["lr"], Tensor) or options["foreach"] or unserved_options(options) is not None:
            return False
        old = before[i] if i < len(before) else []
        packed = pack(group["params"], optimizer.state, options["amsgrad"], table.num_groups, cursor, old)
        if packed is None:
            return False
        rows, counts, written, some_grads, cursor = packed
        constants = {name: options[name] for name in CONSTANTS}
        try:
            for count in counts:
                table.add_group(count, **constants)
        except Exception:  # torch has the words for it
            return False
        table.rows.frombytes(rows)
        width = 5 if options["amsgrad"] else 4
        kernels.written += written + written[_EXP_AVG_SQ::width]
        if constants["weight_decay"] != 0 and constants["decoupled_weight_decay"]:
            kernels.written += written[::width]
        grads += some_grads  # held until the call is over
        written_by_group.append(written)
    _written[optimizer] = written_by_group
    counters = table.counters
    return len(set(counters)) == len(counters) and kernels.run()
