"""One step of an optimizer at a time."""

from __future__ import annotations

import inspect
import os
import sys
from threading import RLock, get_ident

from torch.optim import Optimizer

owners: dict[int, Alone | int] = {}
"""Who is in a step of an optimizer, by the optimizer's id: an ``Alone``, or the thread of a long step of ``pybind/step.c``, which
enters itself only where nobody is, and takes only itself out."""

_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_removing = RLock()  # a signal's handler may step while its thread is in here


def _forget() -> None:
    """In a forked child, which has none of the threads."""
    global _removing
    _removing = RLock()
    owners.clear()


os.register_at_fork(after_in_child=_forget)


class Alone:
    """A context in which no other thread is in a step of the same optimizer.

    Args:
        optimizer: the one whose ``_step`` enters. The same thread may enter again, as a hook does that steps.

    Raises:
        RuntimeError: another thread is in one. Two steps at once would mix their updates, element by element.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._thread = get_ident()

    def __enter__(self) -> None:
        # One call, so that of two threads one is first.
        while (owner := owners.setdefault(id(self._optimizer), self)) is not self:
            if isinstance(owner, Alone):
                ours = owner._thread == self._thread
                under_way = _steps_under_way(owner._thread, self._optimizer) - ours  # this one
                if under_way <= 0:
                    self._remove(owner)  # Ctrl-C had come just before it would have let go
                    continue
                if ours:
                    return
            raise RuntimeError(
                "roundpipe_go: another thread is in a step of this optimizer, and nothing of this step was done; "
                "let one thread step it, or hold a lock around step()"
            )

    def __exit__(self, *_: object) -> None:
        if owners.get(id(self._optimizer)) is self:
            del owners[id(self._optimizer)]

    def _remove(self, owner: Alone) -> None:
        """Takes out an owner that is in no step, if no other thread has done so."""
        # A thread that Ctrl-C has interrupted in here keeps the lock for good; others take microseconds.
        locked = _removing.acquire(timeout=1)
        try:
            if owners.get(id(self._optimizer)) is owner:
                del owners[id(self._optimizer)]
        finally:
            if locked:
                _removing.release()


def _steps_under_way(thread: int, optimizer: Optimizer) -> int:
    """How many of the thread's frames are ``_step`` of the optimizer."""
    for _ in range(1000):
        frame, found, suspended = sys._current_frames().get(thread), 0, False
        while frame is not None:
            found += frame.f_code.co_name == "_step" and frame.f_locals.get("self") is optimizer
            suspended |= bool(frame.f_code.co_flags & _SUSPENDED)
            frame = frame.f_back
        # A generator that its thread has left meanwhile no longer knows who called it.
        if found or not suspended:
            return found
    return 1
