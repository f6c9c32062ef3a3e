"""One step of an optimizer at a time."""

from __future__ import annotations

import os
import sys
from threading import RLock, get_ident

from torch.optim import Optimizer

owners: dict[int, int] = {}
"""The thread that is in a step of an optimizer, by the optimizer's id. ``pybind/step.c`` enters its long steps as well."""

_lock = RLock()  # a signal's handler may step while its thread is in here


def _forget() -> None:
    """In a forked child, which has none of the threads."""
    global _lock
    _lock = RLock()
    owners.clear()


os.register_at_fork(after_in_child=_forget)


class Alone:
    """A context in which no other thread is in a step of the same optimizer.

    Args:
        optimizer: the one that is stepped. The same thread may enter again, as a hook does that steps.

    Raises:
        RuntimeError: another thread is in one. Two steps at once would mix their updates, element by element.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer  # as long as the frame of a step is there
        self._outermost = False

    def __enter__(self) -> None:
        global _lock
        thread, key = get_ident(), id(self._optimizer)
        lock = _lock
        if not lock.acquire(
            timeout=1
        ):  # a thread that Ctrl-C has interrupted in here keeps it for good; others take microseconds
            lock = _lock = RLock()
            lock.acquire()
        try:
            owner = owners.get(key)
            if owner == thread:
                return
            # An owner that is in no step was interrupted by Ctrl-C just before it would have let go.
            if owner is not None and _is_in_a_step(owner, self._optimizer):
                raise RuntimeError(
                    "roundpipe_go: another thread is in a step of this optimizer, and nothing of this step was done; "
                    "let one thread step it, or hold a lock around step()"
                )
            self._outermost = True
            owners[key] = thread
        finally:
            lock.release()

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            owners.pop(id(self._optimizer), None)


def _is_in_a_step(thread: int, optimizer: Optimizer) -> bool:
    """Whether one of the thread's frames is a step of the optimizer."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name in ("step", "_step") and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False
