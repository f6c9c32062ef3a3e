"""Two processes that talk over gloo, with an end to everything they may wait for."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZE = 2
_TIMEOUT_S = 120


def run(worker: Callable[..., Any], directory: Path, *args: Any) -> list[Any]:
    """Calls ``worker(*args)`` in a group of two fresh processes.

    Args:
        worker: a function of a module, which the processes import.
        directory: an empty one, for the rendezvous and the results.
        args: what can be pickled.

    Returns:
        What each rank returned. Tensors, numbers, strings and containers of them.

    Raises:
        ProcessRaisedException: a worker failed; its traceback is the message.
        TimeoutError: the workers did not end in time. They have been killed.
    """
    directory.mkdir(parents=True)
    context = mp.spawn(_run, (worker, directory, args), nprocs=WORLD_SIZE, join=False)
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{worker.__name__} did not end within {_TIMEOUT_S} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]


def _run(rank: int, worker: Callable[..., Any], directory: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(directory / "store"), WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=_TIMEOUT_S),
    )
    try:
        torch.save(worker(*args), directory / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
