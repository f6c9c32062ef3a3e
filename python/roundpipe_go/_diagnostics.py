"""Facts for a bug report."""

from __future__ import annotations

import os
import platform
import sys
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


def build_info() -> dict[str, Any]:
    """Returns what a bug report needs: versions, backend, arithmetic, square roots and why, threads, environment.

    Returns:
        A dictionary of strings, numbers, lists and dictionaries, fit for JSON. Keys are added from version to version.

    Raises:
        ImportError: the native part cannot be loaded; the message says why.
        ValueError, RuntimeError: an environment variable asks for what does not exist here.
    """
    native = _binding.build_info()
    arithmetic, double = torch_arithmetic(torch.float32), torch_arithmetic(torch.float64)
    return {
        "roundpipe_go": version("roundpipe-go"),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "go": native["go_version"],
        "platform": platform.platform(),
        "cpu": _cpu(),
        "extension": native["extension"],
        "backend": _settings.get_backend(),
        "backends": list(_settings.available_backends()),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "arithmetic": arithmetic.arithmetic,
        "square_root": arithmetic.square_root,
        "why": arithmetic.why,
        "square_root_float64": double.square_root,
        "why_float64": double.why,
        "threads": {
            "roundpipe_go": _settings.get_num_threads(),
            "torch": torch.get_num_threads(),
            "gomaxprocs": native["gomaxprocs"],
            "cpus_at_load": native["num_cpu"],
            "affinity": sorted(os.sched_getaffinity(0)),
        },
        "forked": _binding.forked(),
        "environment": {name: os.environ[name] for name in SWITCHES if name in os.environ},
    }


def report() -> str:
    """Returns ``build_info`` as lines for people."""
    info = build_info()
    threads = info.pop("threads")
    environment = info.pop("environment")
    lines = [f"{name:<22}{', '.join(value) if isinstance(value, list) else value}" for name, value in info.items()]
    lines += [f"{'threads: ' + name:<22}{value}" for name, value in threads.items()]
    lines += [f"{'environment':<22}{name}={value}" for name, value in environment.items()] or [
        "environment           no switch is set"
    ]
    return "\n".join(lines)
