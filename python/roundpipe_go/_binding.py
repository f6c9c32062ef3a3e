"""The only importer of ``_native``: typed wrappers around its functions.

The module is loaded at first use, not at import. Its Go runtime does not survive ``fork``, so a process that forks before
its first step has nothing to lose; in a child forked later no function of it may be called, and ``_module`` refuses.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import signal
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from . import _alone, _places

if TYPE_CHECKING:
    from types import ModuleType

_ABI = 7

PlainStep = Callable[[int, list[dict[str, Any]], dict[Any, Any], list[tuple[int, int] | None], int, int], bool]

DTYPES = (torch.float32, torch.float64)
"""Types of elements, in the order of their codes in Go."""

EXCHANGE_API = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""DLPack's C exchange API, which came with torch 2.10 or so, and without which no step is plain; else None."""

LIBRARY_FUNCTIONS = {torch.float32: "vmsSqrt", torch.float64: "vmdSqrt"}
"""oneMKL's square roots, which torch's official wheels call and export."""

FORKED = "this process was forked after the Go runtime had started"
"""Why nothing is computed in Go where ``forked`` says so."""

_loaded = False
_backends: int | None = None
_forked = False
_child = False


def _after_fork_in_child() -> None:
    global _forked, _child
    _forked, _child = _forked or _loaded, True


os.register_at_fork(after_in_child=_after_fork_in_child)


def forked() -> bool:
    """Whether this process was forked from one that had loaded the Go runtime.

    Go must not be entered then: it may wait for threads that the fork has left behind.
    """
    return _forked


def is_child() -> bool:
    """Whether this process was forked after this package was imported. torch's own threads are then left behind."""
    return _child


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """A context after which two signals are handled as before it. Go's runtime takes them and calls nobody else.

    It would need SIGURG for preemption, which setup.py turns off, and SIGPIPE for writes of its own, of which there are none. The
    other signals it hands on to the handlers that it finds.
    """
    sigaction = ctypes.CDLL(None).sigaction
    kept = {number: ctypes.create_string_buffer(256) for number in (signal.SIGURG, signal.SIGPIPE)}
    for number, action in kept.items():
        sigaction(int(number), None, action)
    try:
        yield
    finally:
        for number, action in kept.items():
            sigaction(int(number), action, None)


_loading = threading.Lock()


def _module() -> ModuleType:
    if _forked:
        raise RuntimeError(f"roundpipe_go: {FORKED}; start workers by spawn or forkserver")
    return _loaded_module()


@functools.cache
def _loaded_module() -> ModuleType:
    with _loading:
        return _load()


def _load() -> ModuleType:
    global _loaded, _backends
    try:
        _loaded = True
        with _signals_kept():
            from . import _native

            abi = _native.ABI()  # waits for Go's runtime to be ready
    except ImportError as error:
        _loaded = False
        raise ImportError(
            f"roundpipe_go: its native part cannot be loaded ({error}); a source tree needs `pip install -e .` first"
        ) from error
    if abi != _ABI:
        raise ImportError(
            f"roundpipe_go: {_native.__file__} speaks ABI {abi}, this Python code {_ABI}; "
            "they come from different versions, reinstall roundpipe-go"
        )
    _native.SetTeam(*(0, 0, 0) if _child else team())  # OpenMP would wait for threads that the fork has left behind
    _backends = int(_native.Backends())
    return _native


def backends() -> int:
    """Bit mask of the backends this CPU can run, bit 0 the generic one. A forked child has it from its parent."""
    if _backends is None:
        _module()
    return cast("int", _backends)


def team() -> tuple[int, int, int]:
    """The addresses that ``SetTeam`` takes, of functions of the OpenMP in the loaded torch, or zeros.

    Steps run on the threads that torch's own operations run on: after each of these they spin for a while, on the cores that
    others would need.
    """
    try:
        library = _libtorch_cpu()
        functions = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_max_threads
    except (OSError, AttributeError):
        return 0, 0, 0
    parallel, thread_num, max_threads = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return parallel, thread_num, max_threads


@functools.cache
def has_record_function_observers() -> Callable[[], bool]:
    """A function that says whether anybody observes torch's ``record_function`` now: ``at::hasCallbacks``.

    Profilers, execution trace observers and tools written in C++ do. Without that symbol in torch it always says yes.
    """
    try:
        has_callbacks = ctypes.PyDLL(_libtorch_cpu()._name)._ZN2at12hasCallbacksEv
    except (OSError, AttributeError):
        return lambda: True
    has_callbacks.restype = ctypes.c_bool
    return has_callbacks


def _libtorch_cpu() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@contextlib.contextmanager
def one_mkl_thread() -> Iterator[None]:
    """A context in which oneMKL, which torch's square root is, starts no threads for calls of this thread."""
    try:
        set_threads = _libtorch_cpu().MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        yield
        return
    before = set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


@functools.cache
def library_square_root(dtype: torch.dtype) -> bool:
    """Finds oneMKL's square root of a dtype in the loaded torch and hands it to Go; False for a torch without MKL."""
    try:
        library = _libtorch_cpu()
        function = getattr(library, LIBRARY_FUNCTIONS[dtype])
    except (OSError, AttributeError):
        return False
    # A call of it then stays on its thread, whatever torch's number of threads.
    set_threads = getattr(library, "MKL_Set_Num_Threads_Local", None)
    addresses = [ctypes.cast(f, ctypes.c_void_p).value or 0 if f else 0 for f in (function, set_threads)]
    _module().SetLibrarySquareRoot(DTYPES.index(dtype), *addresses)
    return True


def plain_step() -> PlainStep | None:
    """The function ``step`` of pybind/step.c, which has its description.

    None in a forked child, and with a torch that lacks what it needs.
    """
    return None if _forked else _plain_step()


@functools.cache
def _plain_step() -> PlainStep | None:
    places = _places.learn() if EXCHANGE_API is not None else None
    if places is None:
        return None
    function = ctypes.PyDLL(_module().__file__).roundpipe_go_plain_step
    function.argtypes, function.restype = [ctypes.py_object] * 5, ctypes.py_object
    try:
        step = function(_alone.owners, EXCHANGE_API, torch.Tensor, torch.nn.Parameter, tuple(places))
    except (ImportError, ValueError):  # another version of the interface, or another name
        return None
    return cast("PlainStep", step)


def sqrt(y: int, x: int, numel: int, *, dtype: torch.dtype, backend: int, square_root: int) -> None:
    """Writes the square roots of ``numel`` elements at address ``x`` to address ``y``."""
    _module().Sqrt(y, x, numel, DTYPES.index(dtype), backend, square_root)


Call = tuple[int, int, int, int, int, int, int, int, int]
"""The words of a call in ``pybind/doc.go``."""


def step(calls: Sequence[Call]) -> int:
    """Takes the steps of all calls, or of none, without the GIL.

    Returns:
        0 when all is updated; k > 0 when row k-1 of a call is not for the kernels and nothing was changed.

    Raises:
        RuntimeError: the tables are wrong, or the update failed.
    """
    table = array("q", itertools.chain.from_iterable(calls))
    return int(_module().Step(table.buffer_info()[0], len(calls)))


def build_info() -> dict[str, Any]:
    """What the Go side says of itself."""
    module = _module()
    return {**json.loads(module.BuildInfo()), "extension": module.__file__}
