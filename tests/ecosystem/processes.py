"""Two processes that talk over gloo, with an end to everything they may wait for."""

from __future__ import annotations

import contextlib
import datetime
import io
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD_SIZE = 2
_TIMEOUT_S = 180


class Group:
    """Processes that stay for many calls, since starting them takes longer than a test.

    Args:
        directory: where the processes find each other.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._starts = 0
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def run(self, worker: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls ``worker(*args)`` in each process.

        Args:
            worker: a function of a module, which the processes import.
            args: what can be pickled.

        Returns:
            What each rank returned: tensors, numbers, strings and containers of them.

        Raises:
            RuntimeError: a worker raised; its traceback is the message. The next call starts new processes.
            TimeoutError: the workers did not end in time. They have been killed.
        """
        if not self._processes:
            self._start()
        try:
            for connection in self._connections:
                connection.send((worker, args))
            return self._results(worker.__name__)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._starts += 1
        context = multiprocessing.get_context("spawn")
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            store = str(self._directory / f"store{self._starts}")
            process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _results(self, name: str) -> list[Any]:
        deadline = time.monotonic() + _TIMEOUT_S
        replies: dict[int, bytes] = {}
        while len(replies) < WORLD_SIZE:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} did not end within {_TIMEOUT_S} s")
            for rank, connection in enumerate(self._connections):
                if rank not in replies and connection.poll(0.05):
                    failure, replies[rank] = connection.recv()
                    if failure is not None:  # the other rank may wait for this one for ever
                        raise RuntimeError(f"{name} on rank {rank}:\n{failure}")
        return [torch.load(io.BytesIO(replies[rank]), weights_only=True) for rank in range(WORLD_SIZE)]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


def _serve(rank: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    # As a launcher sets it: engines read it although the group is there. Nobody listens at this address.
    size = str(WORLD_SIZE)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=_TIMEOUT_S),
    )
    with contextlib.suppress(EOFError):  # the parent is gone
        while True:
            worker, args = connection.recv()
            failure, result = None, io.BytesIO()
            try:
                torch.save(worker(*args), result)
            except Exception:
                failure = traceback.format_exc()
            connection.send((failure, result.getvalue()))
