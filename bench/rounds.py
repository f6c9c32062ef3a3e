"""Interleaved rounds: every contestant takes its turn in each, so that all meet the same machine."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from machine import Load, copy_bandwidth, runnable, wait_for_quiet
from peers import OURS, TORCH, Make
from torch import Tensor
from works import LR, Work

Clock = Callable[[], float]

FRESH, AGAIN = "after a backward", "back to back"

SCRATCH = 1 << 22
"""Elements that stand for the activations of a backward: 16 MB, more than two cores' L2."""

TRIAL_ROUNDS = 3
"""What every contestant gets if LATEST allows. Then bits are compared."""

LATEST = 4
"""Times the wanted seconds, after which no round begins."""

SMALL = 1 << 20
"""Elements below which a turn has several steps, since the wait before it takes longer than they do."""

LEAST_QUIET = 3
"""Turns without others on the machine from which the median is that of these turns alone."""

HOPELESS = 50
"""After TRIAL_ROUNDS, a contestant this many times slower than ours has no further turns."""


@dataclass
class Result:
    """Times of one work on a number of threads, in milliseconds by mode and contestant."""

    work: str
    threads: int
    tensors: int
    numel: int
    copy_gb_s: float
    others_cpu: float
    """Cores that other processes, and the hypervisor, took while this was timed."""
    ms: dict[str, dict[str, list[float]]]
    bits: dict[str, bool]
    """Whether parameters and moments equal those of torch's default."""
    dropped: list[str]
    quiet: dict[str, float]
    """Share of a contestant's turns that had the machine for themselves."""


@dataclass
class Turn:
    """Milliseconds by mode, and whether the machine did nothing else before and after."""

    ms: dict[str, list[float]]
    quiet: bool


class Contestant:
    """One peer with parameters of its own; the gradients belong to all."""

    def __init__(self, make: Make, work: Work, grads: list[Tensor], clock: Clock) -> None:
        self.work = work
        self.clock = clock
        self.params = work.params()
        self.steps = 0
        self.turns: list[Turn] = []
        if work.in_backward:
            self.optimizers = [make([{"params": [param], "lr": LR}]) for param in self.params]
            for param, optimizer in zip(self.params, self.optimizers, strict=True):
                param.register_post_accumulate_grad_hook(lambda param, optimizer=optimizer: self._in_hook(param, optimizer))
        else:
            dealt = [{"params": self.params[i :: work.groups], "lr": LR} for i in range(work.groups)]
            self.optimizers = [make(dealt)]
            for param, grad in zip(self.params, grads, strict=True):
                param.grad = grad
        self.grads = grads

    def step(self) -> float:
        """One step; returns its seconds."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.work.lr(self.steps)
        self.steps += 1
        if self.work.in_backward:
            return self._backward()
        begin = self.clock()
        self.optimizers[0].step()
        return self.clock() - begin

    def _backward(self) -> float:
        self.in_hooks = 0.0
        torch.autograd.backward([param.view_as(param) for param in self.params], self.grads)
        return self.in_hooks

    def _in_hook(self, param: Tensor, optimizer: torch.optim.Optimizer) -> None:
        begin = self.clock()
        optimizer.step()
        self.in_hooks += self.clock() - begin
        param.grad = None

    def turn(self, modes: Sequence[str], repeats: int, scratch: Tensor) -> None:
        quiet = wait_for_quiet()
        ms: dict[str, list[float]] = {FRESH: [], AGAIN: []}
        for _ in range(repeats):
            scratch.mul_(1.0)
            torch._foreach_mul_(self.grads, 1.0)
            ms[FRESH].append(1e3 * self.step())
        if AGAIN in modes and not self.work.in_backward:
            ms[AGAIN] += [1e3 * self.step() for _ in range(repeats)]
        self.turns.append(Turn(ms, quiet and runnable() < torch.get_num_threads()))

    def ms(self) -> dict[str, list[float]]:
        """Milliseconds of its steps by mode: those of quiet turns, if there are enough of them."""
        quiet = [turn for turn in self.turns if turn.quiet]
        kept = quiet if len(quiet) >= LEAST_QUIET else self.turns
        return {mode: [ms for turn in kept for ms in turn.ms[mode]] for mode in (FRESH, AGAIN)}

    def has_bits_of(self, other: Contestant) -> bool:
        return all(
            torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(self._written(), other._written(), strict=True)
        )

    def _written(self) -> list[Tensor]:
        state: dict[Tensor, dict[str, Any]] = {}
        for optimizer in self.optimizers:
            state.update(optimizer.state)
        return [t for p in self.params for t in (p.detach(), state[p]["exp_avg"], state[p]["exp_avg_sq"])]


def run(
    work: Work, makes: dict[str, Make], floors: dict[str, Make], threads: int, seconds: float, modes: Sequence[str], clock: Clock
) -> Result:
    """Times a work for about so many seconds, at least TRIAL_ROUNDS rounds."""
    torch.set_num_threads(threads)
    grads = work.grads()
    contestants = {name: Contestant(make, work, grads, clock) for name, make in (makes | floors).items()}
    for contestant in contestants.values():
        contestant.step()  # makes the state
    repeats = 5 if work.numel < SMALL and len(work.shapes) < 100 else 1
    scratch = torch.ones(SCRATCH)
    bits: dict[str, bool] = {}
    gc.collect()
    gc.disable()
    copies = [copy_bandwidth()]
    load = Load()
    begin = time.perf_counter()
    rounds = 0
    slow: dict[str, Contestant] = {}
    while (spent := time.perf_counter() - begin) < seconds or (rounds < TRIAL_ROUNDS and spent < LATEST * seconds):
        torch._foreach_mul_(grads, -2.0 if rounds % 2 else 0.5)
        names = list(contestants)
        for i in range(len(names)):
            contestants[names[(i + rounds) % len(names)]].turn(modes, repeats, scratch)
        rounds += 1
        if rounds == TRIAL_ROUNDS:
            bits = compare(contestants, makes)
            slow = {name: contestants.pop(name) for name in hopeless(contestants)}
    others = load.others()
    copies.append(copy_bandwidth())
    gc.enable()
    at_end = compare(contestants, makes)
    bits = {name: bits.get(name, True) and at_end.get(name, True) for name in {**bits, **at_end}}
    everyone = {**contestants, **slow}
    return Result(
        work.name,
        threads,
        len(work.shapes),
        work.numel,
        statistics.median(copies),
        others,
        {mode: {name: contestant.ms()[mode] for name, contestant in everyone.items()} for mode in (FRESH, AGAIN)},
        bits,
        list(slow),
        {name: statistics.mean(turn.quiet for turn in contestant.turns) for name, contestant in everyone.items()},
    )


def compare(contestants: dict[str, Contestant], makes: dict[str, Make]) -> dict[str, bool]:
    """Whether each but the floors has the bits of torch's default, if that still takes part."""
    truth = contestants.get(TORCH)
    if truth is None:
        return {}
    return {name: c.has_bits_of(truth) for name, c in contestants.items() if c is not truth and name in makes}


def hopeless(contestants: dict[str, Contestant]) -> list[str]:
    if OURS not in contestants:
        return []
    median = {name: statistics.median(c.ms()[FRESH]) for name, c in contestants.items()}
    return [name for name in contestants if median[name] > HOPELESS * median[OURS]]
