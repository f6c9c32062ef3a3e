"""One step of an optimizer at a time: the second thread is told so, and nobody is locked out for good."""

from __future__ import annotations

import os
import sys
import threading
import time
from unittest import mock

import pytest
import torch

import roundpipe_go
from roundpipe_go import _alone, _binding


@pytest.fixture(autouse=True)
def _no_owners():
    """Ctrl-C in other tests may have left some."""
    _alone.owners.clear()


def make_optimizer() -> roundpipe_go.Adam:
    param = torch.ones(3, requires_grad=True)
    param.grad = torch.ones(3)
    return roundpipe_go.Adam([param])


class Interrupting:
    """An options value that lets another thread step while the optimizer is in a step of its own."""

    def __init__(self, optimizer: roundpipe_go.Adam) -> None:
        self.optimizer, self.errors = optimizer, []

    def __bool__(self) -> bool:
        thread = threading.Thread(target=self._step)
        thread.start()
        thread.join(60)
        return False

    def _step(self) -> None:
        try:
            self.optimizer.step()
        except RuntimeError as error:
            self.errors.append(str(error))


def test_a_second_thread_is_refused_and_changes_nothing():
    optimizer = make_optimizer()
    meanwhile = Interrupting(optimizer)
    optimizer.param_groups[0]["fused"] = meanwhile  # asked for its truth in the middle of the step
    (param,) = optimizer.param_groups[0]["params"]
    optimizer.step()
    assert meanwhile.errors
    assert all("another thread is in a step of this optimizer" in error for error in meanwhile.errors)
    assert optimizer.state[param]["step"].item() == 1


def test_a_second_thread_is_refused_while_the_kernels_work():
    """A long step of plain tensors lets the GIL go."""
    param = torch.ones(1 << 25, requires_grad=True)
    param.grad = torch.ones(1 << 25)
    optimizer = roundpipe_go.Adam([param])
    optimizer.step()
    refusals: list[str] = []
    steps = 1
    while not refusals and steps < 50:
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        while thread.is_alive() and not _alone.owners:
            time.sleep(1e-4)
        try:
            optimizer.step()
            steps += 1
        except RuntimeError as error:
            refusals.append(str(error))
        thread.join(60)
        steps += 1
    assert ["another thread is in a step of this optimizer" in text for text in refusals] == [True]
    assert optimizer.state[param]["step"].item() == steps
    assert not _alone.owners


def test_afterwards_any_thread_may_step():
    optimizer = make_optimizer()
    optimizer.step()
    threads = [threading.Thread(target=optimizer.step) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join(60)
    assert [state["step"].item() for state in optimizer.state.values()] == [4]
    assert not _alone.owners


def test_a_step_in_a_step_of_the_same_thread():
    """What a step calls may step; the outer step keeps its optimizer until it is done."""
    optimizer = make_optimizer()
    optimizer.step()
    inner = []

    class Stepping:
        def __bool__(self) -> bool:
            if not inner:
                (outer,) = _alone.owners.values()
                inner.append(outer)
                optimizer.step()
                assert _alone.owners == {id(optimizer): outer}
            return False

    optimizer.param_groups[0]["fused"] = Stepping()
    optimizer.step()
    assert inner
    assert not _alone.owners
    assert [state["step"].item() for state in optimizer.state.values()] == [3]


@pytest.mark.parametrize("same_thread", [True, False])
def test_an_interrupted_thread_keeps_nobody_out(same_thread):
    """As if Ctrl-C had come between the end of a step and the note of it: the next step is right, and the one after it quick."""
    optimizer = make_optimizer()
    optimizer.step()
    _alone.owners[id(optimizer)] = _alone.Alone(optimizer)
    if same_thread:
        optimizer.step()
    else:
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join(60)
    assert [state["step"].item() for state in optimizer.state.values()] == [2]
    assert not _alone.owners
    if _binding.plain_step() is not None:  # None on torch 2.6, which has only the long way
        with mock.patch.object(roundpipe_go.Adam, "_step", side_effect=AssertionError("the long way")):
            optimizer.step()


def test_a_look_that_lands_in_a_generator():
    """A thread that is in a generator when its frames are looked at, and out of it when they are walked."""
    optimizer = make_optimizer()
    done = threading.Event()

    class Generating:
        def __bool__(self) -> bool:
            while not done.is_set():
                any(number < 0 for number in range(30))
            return False

    optimizer.param_groups[0]["fused"] = Generating()
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    while not _alone.owners:
        time.sleep(1e-3)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert all(_alone._steps_under_way(thread.ident, optimizer) == 1 for _ in range(20_000))
    finally:
        sys.setswitchinterval(before)
        done.set()
        thread.join(60)


def test_a_fork_forgets_the_threads_of_its_parent():
    optimizer = make_optimizer()
    _alone.owners[id(optimizer)] = 1  # a long step of another thread
    try:
        child = os.fork()
        if child == 0:
            os._exit(len(_alone.owners))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        _alone.owners.clear()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_lets_go(error):
    optimizer = make_optimizer()

    def raising():
        raise error

    with pytest.raises(error):
        optimizer.step(raising)
    assert not _alone.owners
    optimizer.step()
    assert [state["step"].item() for state in optimizer.state.values()] == [1]
