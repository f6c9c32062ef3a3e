"""What the kernels do not serve: through torch's own functions, with one warning per reason."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# torch/optim/__init__.py deletes the attributes torch.optim.adam and adamw; the modules are reached by import alone.
from torch.optim.adam import adam as _adam
from torch.optim.adamw import adamw as _adamw

from . import _binding

DECOUPLED_IN_ADAM = "decoupled_weight_decay" in inspect.signature(_adam).parameters
"""False in torch 2.6, where AdamW computes in a function of its own and its groups have no such option."""


class FallbackWarning(UserWarning):
    """A step, or some parameters of it, ran through ``torch.optim``: right, but at torch's speed.

    Issued once per reason and process. ``warnings.simplefilter("error", roundpipe_go.FallbackWarning)``
    turns it into an error before anything of the step was written.
    """


_warned: set[str] = set()
_INTERNAL = (str(Path(__file__).parent) + os.sep, str(Path(torch.__file__).parent) + os.sep)


def warn(reason: str, params: Sequence[Tensor]) -> None:
    """Warns once per reason, at the line of the caller outside of this package and torch.

    Args:
        reason: why, and what to change.
        params: those concerned, at least one.
    """
    if reason in _warned:
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        level, frame = level + 1, frame.f_back
    count = f"{len(params)} parameter{'s' * (len(params) > 1)}"
    first = f"{params[0].dtype} of shape {tuple(params[0].shape)}"
    message = f"roundpipe_go: torch.optim computes {count} of this step, the first {first}: {reason}"
    warnings.warn(message, FallbackWarning, stacklevel=level)
    _warned.add(reason)


@contextlib.contextmanager
def existing_threads() -> Iterator[None]:
    """A context in which torch's operations use no threads that a fork has left behind, and would wait for without an end."""
    threads = torch.get_num_threads()
    if not _binding.is_child() or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def torch_adam(lists: Sequence[list[Tensor]], options: dict[str, Any]) -> None:
    """Calls ``torch.optim.adam.adam`` of the installed torch, whatever its version calls decoupled decay.

    The lists stay as they are: torch replaces complex tensors in its own by their real views.
    """
    function: Callable[..., None] = _adam
    if not DECOUPLED_IN_ADAM:
        options = dict(options)
        if options.pop("decoupled_weight_decay"):
            function = _adamw
    function(*(list(some) for some in lists), **options)
