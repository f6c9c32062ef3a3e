"""One step of an optimizer at a time."""

from __future__ import annotations

from threading import get_ident

from torch.optim import Optimizer

_owners: dict[int, int] = {}
"""The thread that is in a step of an optimizer, by the optimizer's id."""


class Alone:
    """A context in which no other thread is in a step of the same optimizer.

    Args:
        optimizer: the one that is stepped. The same thread may enter again, as a hook does that steps.

    Raises:
        RuntimeError: another thread is in one. Two steps at once would mix their updates, element by element.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._id = id(optimizer)

    def __enter__(self) -> None:
        if _owners.setdefault(self._id, get_ident()) != get_ident():  # setdefault is atomic
            raise RuntimeError(
                "roundpipe_go: another thread is in a step of this optimizer, and nothing of this step was done; "
                "let one thread step it, or hold a lock around step()"
            )

    def __exit__(self, *_: object) -> None:
        _owners.pop(self._id, None)
