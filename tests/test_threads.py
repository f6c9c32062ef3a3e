"""Threads: the bits do not depend on them, many may step at once, and Python goes on during a step."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

import roundpipe_go
from cases import SERIAL_BELOW
from oracle import Twins, assert_equal_bits, randn_like

BIG = 4 * SERIAL_BELOW + 4321


def trained(make_params, num_threads: int) -> list[Tensor]:
    roundpipe_go.set_num_threads(num_threads)
    params = make_params()
    optimizer = roundpipe_go.AdamW(params, amsgrad=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for param in params:
            param.grad = randn_like(param, generator)
        optimizer.step()
    return [t for param in params for t in (param, *optimizer.state[param].values())]


def big_and_small() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(n, generator=generator).requires_grad_() for n in (1, BIG, 17, 70_001, 3, 3, 33_000)]


@pytest.mark.parametrize("num_threads", [2, 3, 4, 7, 16, 64])
def test_bits_do_not_depend_on_threads(num_threads, backend):
    for i, (got, want) in enumerate(zip(trained(big_and_small, num_threads), trained(big_and_small, 1), strict=True)):
        assert_equal_bits(got, want, f"{num_threads} threads: tensor {i}")


def cpu_seconds_of_others(num_threads: int) -> float:
    """The part of a step's processor time that threads other than the caller's have spent."""
    roundpipe_go.set_num_threads(num_threads)
    torch.set_num_threads(1)
    param = torch.linspace(-1, 1, BIG).requires_grad_()
    param.grad = torch.ones(BIG)
    optimizer = roundpipe_go.Adam([param])
    optimizer.step()
    time.sleep(0.1)  # OpenMP's threads spin for a while after what ran before
    own, process = time.thread_time(), time.process_time()
    for _ in range(30):
        optimizer.step()
    own, process = time.thread_time() - own, time.process_time() - process
    return (process - own) / process


def test_a_big_step_runs_in_parallel():
    """So that the other tests of threads mean something: helpers do a share of the work, and none if one thread is asked for."""
    assert cpu_seconds_of_others(1) < 0.05
    assert cpu_seconds_of_others(4) > 0.15


def test_optimizers_in_python_threads_at_once():
    """Eight threads, each with models of its own, big enough that the steps themselves are parallel now and then."""
    roundpipe_go.set_num_threads(2)
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def train(seed: int) -> None:
        try:
            numel = SERIAL_BELOW + 1000 if seed % 4 == 0 else 1000 * seed + 1
            generator = torch.Generator().manual_seed(seed)
            values = torch.randn(numel, generator=generator)
            twins = Twins(lambda: [values.clone().requires_grad_()], amsgrad=seed % 2 == 0)
            start.wait()
            for step in range(6):
                twins.train(1, seed=step)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_many_small_steps_at_once():
    """Short calls that come and go while others run."""
    params = [torch.linspace(-1, 1, 100 + i).requires_grad_() for i in range(6)]
    optimizers = [roundpipe_go.Adam([param]) for param in params]

    def train(i: int) -> None:
        for _ in range(200):
            params[i].grad = torch.full_like(params[i], 0.5)
            optimizers[i].step()

    threads = [threading.Thread(target=train, args=(i,)) for i in range(len(params))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, param in enumerate(params):
        want = torch.linspace(-1, 1, 100 + i).requires_grad_()
        optimizer = torch.optim.Adam([want])
        for _ in range(200):
            want.grad = torch.full_like(want, 0.5)
            optimizer.step()
        assert_equal_bits(param, want, f"thread {i}")
        assert optimizers[i].state[param]["step"].item() == 200.0


def test_steps_from_autograd_hooks():
    """One optimizer a parameter, stepped inside of backward as soon as its gradient is there."""

    def run(cls: type) -> list[Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
        optimizers = {param: cls([param], lr=0.01) for param in model.parameters()}

        def step(param: Tensor) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        for _ in range(5):
            model(torch.linspace(-1, 1, 80).reshape(4, 20)).square().sum().backward()
        return list(model.parameters())

    for i, (got, want) in enumerate(zip(run(roundpipe_go.AdamW), run(torch.optim.AdamW), strict=True)):
        assert_equal_bits(got, want, f"params[{i}]")


def test_backward_in_threads_with_hooks():
    def run(cls: type) -> list[Tensor]:
        params = [torch.linspace(-1, 1, 5000).requires_grad_() for _ in range(4)]
        for param in params:
            optimizer = cls([param])
            param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        threads = [threading.Thread(target=lambda p=p: [p.sin().sum().backward() for _ in range(20)]) for p in params]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return params

    for i, (got, want) in enumerate(zip(run(roundpipe_go.Adam), run(torch.optim.Adam), strict=True)):
        assert_equal_bits(got, want, f"params[{i}]")


def test_python_goes_on_during_a_step():
    """A counting thread advances in the middle of one native call: with the GIL held it could not even once.

    The call is long (tens of milliseconds) and the count is taken from the outside right before and after it, so a busy
    machine makes the count small, not zero.
    """
    from roundpipe_go import _binding

    param = torch.zeros(1 << 24).requires_grad_()
    param.grad = torch.ones(1 << 24)
    roundpipe_go.set_backend("generic")  # the slowest
    roundpipe_go.set_num_threads(1)
    optimizer = roundpipe_go.Adam([param])
    count, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            count[0] += 1
            time.sleep(0.0005)

    advances = []
    native = _binding._module().Step

    def step(*arguments):
        before = count[0]
        result = native(*arguments)
        advances.append(count[0] - before)
        return result

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_binding._module(), "Step", step)
            for _ in range(3):
                optimizer.step()
    finally:
        stop.set()
        thread.join()
    # One tick might slip in at the switch before and after the call.
    assert max(advances) > 5, advances


def test_finished_on_return():
    """Nothing is read or written later: the gradient may be overwritten at once."""
    roundpipe_go.set_num_threads(4)
    twins = Twins(lambda: [torch.zeros(BIG).requires_grad_()])
    twins.set_grads([torch.ones(BIG)])
    twins.ours.step()
    twins.params[0].grad.fill_(torch.nan)
    values = twins.params[0].detach().clone()
    time.sleep(0.05)
    assert_equal_bits(twins.params[0], values, "param after the step")
    twins.torch.step()
    twins.assert_equal()
