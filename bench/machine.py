"""The machine, and what others do on it meanwhile."""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path

import psutil
import torch

COPY_BYTES = 1 << 29

SETTLE = 0.02
"""Seconds. OpenMP's threads spin for about 10 ms after their last region, which is not the fault of who comes next."""

PATIENCE = 0.2
"""Seconds to wait for other processes. A turn among them is taken, but marked."""


def copy_bandwidth() -> float:
    """GB/s, read and written, of ``a.copy_(b)`` over 512 MiB: the median of three."""
    a, b = (torch.ones(COPY_BYTES // 4) for _ in range(2))
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        a.copy_(b)
        seconds.append(time.perf_counter() - begin)
    return 2 * COPY_BYTES / statistics.median(seconds) / 1e9


def runnable() -> int:
    """Threads that run or wait for a processor right now, but the one that asks."""
    return int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1


def wait_for_quiet() -> bool:
    """Waits until nothing has run for SETTLE seconds; gives up after PATIENCE and returns False."""
    begin = quiet_since = time.perf_counter()
    while True:
        time.sleep(SETTLE / 10)
        now = time.perf_counter()
        if runnable() > 0:
            quiet_since = now
        if now - quiet_since >= SETTLE:
            return True
        if now - begin >= PATIENCE:
            return False


class Load:
    """Counts the processor time that goes elsewhere from now on."""

    def __init__(self) -> None:
        self.begin = self._now()

    def others(self) -> float:
        """Cores taken on average by other processes and by the hypervisor."""
        wall, busy, own = (now - begin for now, begin in zip(self._now(), self.begin, strict=True))
        return max(0.0, (busy - own) / wall)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        cpu, own = psutil.cpu_times(), psutil.Process().cpu_times()
        return time.perf_counter(), sum(cpu) - cpu.idle - cpu.iowait - cpu.guest - cpu.guest_nice, own.user + own.system


def describe() -> dict[str, str]:
    """What a reader must know of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {
        "cpu": f"{model}, {os.cpu_count()} logical cores, family/model " + "/".join(_numbers(lines)),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "huge_pages": Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "not set"),
    }


def _numbers(lines: list[str]) -> list[str]:
    return [next(line.split(":")[1].strip() for line in lines if line.startswith(key + "\t")) for key in ("cpu family", "model")]
