"""What the user chooses: threads, backend, square root. A function goes before the environment, which is read once."""

from __future__ import annotations

import functools
import operator
import os
import threading
import warnings

import torch

from . import _binding

BACKENDS = ("generic", "avx2", "avx512")
"""Backends in the order of their codes in Go."""

SQUARE_ROOTS = ("auto", "ieee")

MAX_THREADS = 1024
"""More than any machine of today has: a larger number is a mistake."""

_num_threads: int | None = None
_backend: str | None = None
_square_root: str | None = None
_in_force: tuple[int | None, int, str] | None = None
_changing = threading.RLock()
"""Held while a setting is changed, or those in force are put together, which takes several reads."""


@functools.cache
def _switch(name: str) -> str | None:
    """A variable of the environment, or None if it is empty or not set. As OpenMP does, only its first value counts."""
    return os.environ.get(name) or None


def in_force() -> tuple[int, int, str]:
    """The settings of the next step: threads, the backend's code, square root.

    Raises:
        ValueError, RuntimeError: one of the environment is of no use.
    """
    global _in_force
    found = _in_force
    if found is None:  # worth keeping: a step of a small tensor takes no longer than to look it all up
        with _changing:
            threads = get_num_threads() if _num_threads is not None or _switch("ROUNDPIPE_GO_NUM_THREADS") is not None else None
            if threads is None:
                _warn_of_one_thread()
            _in_force = found = threads, BACKENDS.index(get_backend()), get_square_root()
    threads, backend, square_root = found
    return torch.get_num_threads() if threads is None else threads, backend, square_root


@functools.cache  # once
def _warn_of_one_thread() -> None:
    """Says that torchrun has left steps one thread, where there are cores for more.

    torchrun sets ``OMP_NUM_THREADS=1`` for processes that would have none; torch follows it, and so do we.
    """
    get, world = os.environ.get, os.environ.get("LOCAL_WORLD_SIZE", "")
    if (
        "TORCHELASTIC_RUN_ID" not in os.environ
        or get("OMP_NUM_THREADS") != "1"
        or get("LOCAL_RANK") != "0"
        or not world.isdecimal()
    ):
        return
    cores = len(os.sched_getaffinity(0)) // max(int(world), 1)
    if cores > 1 and torch.get_num_threads() == 1:
        warnings.warn(
            f"roundpipe_go: steps use one thread, as torchrun sets OMP_NUM_THREADS=1; there are {cores} cores for each of "
            f"{world} processes: set OMP_NUM_THREADS={cores} before torchrun, or call roundpipe_go.set_num_threads({cores})",
            stacklevel=2,
        )


def set_num_threads(num_threads: int | None) -> None:
    """Sets how many threads a step may use, the calling one included.

    Args:
        num_threads: 1 to 1,024; None follows ``torch.get_num_threads()`` (the default), or the environment
            variable ``ROUNDPIPE_GO_NUM_THREADS`` where it is set. Results do not depend on it.

    Raises:
        TypeError: not an int.
        ValueError: less than 1, or more than any machine has.
    """
    global _num_threads, _in_force
    if num_threads is not None:
        if isinstance(num_threads, bool) or not hasattr(num_threads, "__index__"):
            raise TypeError(f"roundpipe_go: num_threads is {num_threads!r}, want an int; None follows torch.get_num_threads()")
        num_threads = operator.index(num_threads)
        if not 1 <= num_threads <= MAX_THREADS:
            raise ValueError(
                f"roundpipe_go: num_threads is {num_threads}, want 1 to {MAX_THREADS}; None follows torch.get_num_threads()"
            )
    with _changing:
        _num_threads, _in_force = num_threads, None


def get_num_threads() -> int:
    """Returns how many threads a step may use.

    Raises:
        ValueError: ``ROUNDPIPE_GO_NUM_THREADS`` is set, but not to an integer from 1 to 1,024.
    """
    if _num_threads is not None:
        return _num_threads
    value = _switch("ROUNDPIPE_GO_NUM_THREADS")
    if value is None:
        return torch.get_num_threads()
    # isascii: isdecimal takes the digits of every script.
    if not (value.isascii() and value.isdecimal() and 1 <= int(value) <= MAX_THREADS):
        raise ValueError(
            f"roundpipe_go: ROUNDPIPE_GO_NUM_THREADS is {value!r}, want 1 to {MAX_THREADS}; unset it to follow torch"
        )
    return int(value)


def available_backends() -> tuple[str, ...]:
    """Returns the backends that this CPU can run, slowest first."""
    mask = _binding.backends()
    return tuple(name for code, name in enumerate(BACKENDS) if mask >> code & 1)


def set_backend(backend: str | None) -> None:
    """Forces a backend; all give the same bits.

    Args:
        backend: "generic" (portable Go), "avx2" or "avx512"; None takes the best that the CPU can run (the default),
            or the one that the environment variable ``ROUNDPIPE_GO_BACKEND`` names.

    Raises:
        ValueError: there is no such backend.
        RuntimeError: this CPU cannot run it.
    """
    global _backend, _in_force
    if backend is not None:
        _check_backend(backend, "backend")
    with _changing:
        _backend, _in_force = backend, None


def get_backend() -> str:
    """Returns the backend that the next step uses.

    Raises:
        ValueError, RuntimeError: ``ROUNDPIPE_GO_BACKEND`` names one that does not exist, or that this CPU cannot run.
    """
    if _backend is not None:
        return _backend
    name = _switch("ROUNDPIPE_GO_BACKEND")
    if name is None:
        return available_backends()[-1]
    _check_backend(name, "ROUNDPIPE_GO_BACKEND")
    return name


def _check_backend(name: str, where: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"roundpipe_go: {where} is {name!r}, want one of {', '.join(BACKENDS)}")
    available = available_backends()
    if name not in available:
        raise RuntimeError(f"roundpipe_go: {where} is {name!r}, which this CPU cannot run; it has {', '.join(available)}")


def set_square_root(square_root: str | None) -> None:
    """Chooses between torch's bits and the correctly rounded square root.

    Args:
        square_root: "auto" reproduces ``torch.sqrt`` of the installed torch, to the last bit (the default);
            "ieee" rounds correctly, which is the fastest and differs from torch by an ulp here and there; None takes
            what the environment variable ``ROUNDPIPE_GO_SQUARE_ROOT`` says.

    Raises:
        ValueError: neither of these.
    """
    global _square_root, _in_force
    if square_root is not None:
        _check_square_root(square_root, "square_root")
    with _changing:
        _square_root, _in_force = square_root, None


def get_square_root() -> str:
    """Returns "auto" or "ieee"; see ``set_square_root``."""
    if _square_root is not None:
        return _square_root
    name = _switch("ROUNDPIPE_GO_SQUARE_ROOT")
    if name is None:
        return "auto"
    _check_square_root(name, "ROUNDPIPE_GO_SQUARE_ROOT")
    return name


def _check_square_root(name: str, where: str) -> None:
    if name not in SQUARE_ROOTS:
        raise ValueError(f"roundpipe_go: {where} is {name!r}, want one of {', '.join(SQUARE_ROOTS)}")
