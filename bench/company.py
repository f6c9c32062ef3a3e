"""A step in company: eight processes at once, and a Python thread that wants to run meanwhile."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import peers
import torch
from works import LR, Work

PROCESSES = 8
CROWD = Work("8 processes, each 100 x 10,000", ((10_000,),) * 100)
COUNTED = Work("Python thread beside 32 Mi", ((32 << 20,),))
"""Steps far longer than the 5 ms after which Python takes the GIL away."""

WORKS = (CROWD, COUNTED)


def stepper(make: peers.Make, work: Work) -> torch.optim.Optimizer:
    """An optimizer that has its state already."""
    params = work.params()
    for param, grad in zip(params, work.grads(), strict=True):
        param.grad = grad
    optimizer = make([{"params": params, "lr": LR}])
    optimizer.step()
    return optimizer


def _process(names: list[str], threads: int, barrier: Barrier, orders: Connection) -> None:
    torch.set_num_threads(threads)
    makes, absent = peers.load(names)
    optimizers = {name: stepper(make, CROWD) for name, make in makes.items()}
    orders.send(absent)
    while (name := orders.recv()) is not None:
        barrier.wait()
        begin = time.perf_counter()
        for _ in range(5):
            optimizers[name].step()
        orders.send((time.perf_counter() - begin) / 5 * 1e3)


def crowd(names: list[str], threads: int, seconds: float) -> dict[str, float]:
    """Milliseconds a step while PROCESSES do the same: the slowest process of each round, the median of the rounds."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(PROCESSES)
    pipes = [context.Pipe() for _ in range(PROCESSES)]
    processes = [context.Process(target=_process, args=(names, threads, barrier, end), daemon=True) for _, end in pipes]
    for process in processes:
        process.start()
    for here, _ in pipes:
        if absent := here.recv():
            raise RuntimeError(f"bench: absent in one of {PROCESSES} processes only: {absent}")
    ms: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    while not ms[names[-1]] or time.perf_counter() < end:
        for name in names:
            for here, _ in pipes:
                here.send(name)
            ms[name].append(max(here.recv() for here, _ in pipes))
    for here, _ in pipes:
        here.send(None)
    for process in processes:
        process.join()
    return {name: statistics.median(values) for name, values in ms.items()}


class Counter(threading.Thread):
    """Counts as fast as Python lets it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            self.count += 1


def counting(makes: dict[str, peers.Make], seconds: float) -> dict[str, tuple[float, float]]:
    """What a Python thread gets done while steps run on one thread.

    Returns:
        By name the share of its pace while the main thread sleeps, and the milliseconds of a step beside it.
    """
    torch.set_num_threads(1)
    optimizers = {name: stepper(make, COUNTED) for name, make in makes.items()}
    shares: dict[str, list[float]] = {name: [] for name in makes}
    ms: dict[str, list[float]] = {name: [] for name in makes}
    counter = Counter()
    counter.start()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, optimizer in optimizers.items():
            alone, _ = _pace(counter, lambda: time.sleep(0.2))
            beside, took = _pace(counter, lambda optimizer=optimizer: [optimizer.step() for _ in range(3)])
            shares[name].append(beside / alone)
            ms[name].append(took * 1e3 / 3)
    counter.ended = True
    counter.join()
    return {name: (statistics.median(shares[name]), statistics.median(ms[name])) for name in makes}


def _pace(counter: Counter, what: Callable[[], object]) -> tuple[float, float]:
    count, begin = counter.count, time.perf_counter()
    what()
    took = time.perf_counter() - begin
    return (counter.count - count) / took, took
