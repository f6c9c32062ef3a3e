"""Facts for a bug report."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from . import _binding, _settings
from ._torch_arithmetic import torch_arithmetic

SWITCHES = (
    "ROUNDPIPE_GO_NUM_THREADS",
    "ROUNDPIPE_GO_BACKEND",
    "ROUNDPIPE_GO_SQUARE_ROOT",
    "ATEN_CPU_CAPABILITY",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "GOMAXPROCS",
    "GODEBUG",
    "GOGC",
)
"""Environment variables that change what runs, ours first."""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _fact(read: Callable[[], Any]) -> Any:
    """What ``read`` returns, or its complaint: a bug report is wanted most where something is wrong."""
    try:
        return read()
    except (ImportError, RuntimeError, ValueError) as error:
        return f"error: {error}"


def build_info() -> dict[str, Any]:
    """Returns what a bug report needs: versions, backend, arithmetic, square roots and why, threads, environment.

    Returns:
        A dictionary of strings, numbers, lists and dictionaries, fit for JSON. A fact that cannot be had, because the native
        part does not load or a setting is of no use, is a string that begins with "error: ". Keys are added from version to
        version.
    """
    native = _fact(_binding.build_info)
    loaded = isinstance(native, dict)

    def arithmetic(dtype: torch.dtype, name: str) -> Any:
        return _fact(lambda: getattr(torch_arithmetic(dtype), name))

    return {
        "roundpipe_go": version("roundpipe-go"),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "go": native["go_version"] if loaded else None,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "extension": native["extension"] if loaded else native,
        "backend": _fact(_settings.get_backend),
        "backends": _fact(lambda: list(_settings.available_backends())),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "arithmetic": arithmetic(torch.float32, "arithmetic"),
        "square_root": arithmetic(torch.float32, "square_root"),
        "why": arithmetic(torch.float32, "why"),
        "square_root_float64": arithmetic(torch.float64, "square_root"),
        "why_float64": arithmetic(torch.float64, "why"),
        "threads": {
            "roundpipe_go": _fact(_settings.get_num_threads),
            "torch": torch.get_num_threads(),
            "gomaxprocs": native["gomaxprocs"] if loaded else None,
            "cpus_at_load": native["num_cpu"] if loaded else None,
            "affinity": sorted(os.sched_getaffinity(0)),
        },
        "forked": _binding.forked(),
        "environment": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "unknown_switches": sorted(name for name in os.environ if name.startswith("ROUNDPIPE_GO_") and name not in SWITCHES),
    }


def report() -> str:
    """Returns ``build_info`` as lines for people."""
    info = build_info()
    threads = info.pop("threads")
    environment = info.pop("environment")
    unknown = info.pop("unknown_switches")
    lines = [f"{name:<22}{', '.join(value) if isinstance(value, list) else value}" for name, value in info.items()]
    lines += [f"{'threads: ' + name:<22}{value}" for name, value in threads.items()]
    lines += [f"{'environment':<22}{name}={value}" for name, value in environment.items()] or [
        "environment           no switch is set"
    ]
    lines += [f"{'environment':<22}{name} is set, but there is no such switch" for name in unknown]
    return "\n".join(lines)
