"""Threads, backend and square root: who wins, and what a refusal says: the argument, what was wanted, the way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

import roundpipe_go
from roundpipe_go import _settings

BACKENDS = ("generic", "avx2", "avx512")


@pytest.fixture(autouse=True)
def no_switch(monkeypatch):
    for name in ("NUM_THREADS", "BACKEND", "SQUARE_ROOT"):
        monkeypatch.delenv(f"ROUNDPIPE_GO_{name}", raising=False)


def step() -> torch.Tensor:
    param = torch.ones(3, requires_grad=True)
    param.grad = torch.ones(3)
    roundpipe_go.Adam([param]).step()
    return param


def test_threads_follow_torch():
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        assert roundpipe_go.get_num_threads() == num_threads


def test_threads_function_before_environment_before_torch(switch):
    switch("NUM_THREADS", "5")
    assert roundpipe_go.get_num_threads() == 5
    roundpipe_go.set_num_threads(7)
    assert roundpipe_go.get_num_threads() == 7
    roundpipe_go.set_num_threads(None)
    assert roundpipe_go.get_num_threads() == 5
    switch("NUM_THREADS", "")
    assert roundpipe_go.get_num_threads() == torch.get_num_threads()


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("2", TypeError), (True, TypeError), ([], TypeError)],
    ids=repr,
)
def test_bad_threads(value, error):
    roundpipe_go.set_num_threads(3)
    with pytest.raises(error, match=r"^roundpipe_go: num_threads is .*, want .*; None follows"):
        roundpipe_go.set_num_threads(value)
    assert roundpipe_go.get_num_threads() == 3


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", " 2", "²", "٣", "1025", "9" * 30])
def test_bad_threads_of_the_environment(switch, value):
    switch("NUM_THREADS", value)
    message = r"^roundpipe_go: ROUNDPIPE_GO_NUM_THREADS is .*, want 1 to 1024; unset it"
    with pytest.raises(ValueError, match=message):
        roundpipe_go.get_num_threads()
    with pytest.raises(ValueError, match=message):
        step()


def test_backends_are_listed_slowest_first():
    available = roundpipe_go.available_backends()
    assert available[0] == "generic"
    assert [name for name in BACKENDS if name in available] == list(available)
    assert roundpipe_go.get_backend() == available[-1]


def test_backend_function_before_environment(switch, backend):
    roundpipe_go.set_backend(None)
    switch("BACKEND", backend)
    assert roundpipe_go.get_backend() == backend
    roundpipe_go.set_backend("generic")
    assert roundpipe_go.get_backend() == "generic"


@pytest.mark.parametrize("value", ["sse2", "AVX2", "", 2, ("avx2",)], ids=repr)
def test_unknown_backend(value):
    with pytest.raises(ValueError, match=r"^roundpipe_go: backend is .*, want one of generic, avx2, avx512"):
        roundpipe_go.set_backend(value)
    assert roundpipe_go.get_backend() == roundpipe_go.available_backends()[-1]


def test_unknown_backend_of_the_environment(switch):
    switch("BACKEND", "sse2")
    with pytest.raises(ValueError, match=r"^roundpipe_go: ROUNDPIPE_GO_BACKEND is 'sse2', want one of generic, avx2"):
        roundpipe_go.get_backend()
    with pytest.raises(ValueError, match="ROUNDPIPE_GO_BACKEND"):
        step()


def test_backend_that_the_cpu_lacks(monkeypatch, switch):
    """Whatever this CPU has, one without vectors is simulated by the mask that Go reports."""
    from roundpipe_go import _binding

    monkeypatch.setattr(_binding, "backends", lambda: 1)
    assert roundpipe_go.available_backends() == ("generic",)
    message = r"^roundpipe_go: backend is 'avx512', which this CPU cannot run; it has generic$"
    with pytest.raises(RuntimeError, match=message):
        roundpipe_go.set_backend("avx512")
    switch("BACKEND", "avx2")
    with pytest.raises(RuntimeError, match=r"^roundpipe_go: ROUNDPIPE_GO_BACKEND is 'avx2', which this CPU cannot run"):
        roundpipe_go.get_backend()


def test_square_root_function_before_environment(switch):
    assert roundpipe_go.get_square_root() == "auto"
    switch("SQUARE_ROOT", "ieee")
    assert roundpipe_go.get_square_root() == "ieee"
    roundpipe_go.set_square_root("auto")
    assert roundpipe_go.get_square_root() == "auto"


def test_unknown_square_root(switch):
    with pytest.raises(ValueError, match=r"^roundpipe_go: square_root is 'fast', want one of auto, ieee"):
        roundpipe_go.set_square_root("fast")
    switch("SQUARE_ROOT", "fast")
    with pytest.raises(ValueError, match=r"^roundpipe_go: ROUNDPIPE_GO_SQUARE_ROOT is 'fast', want one of auto, ieee"):
        step()


def test_a_bad_switch_changes_nothing(switch):
    """The switches are read before anything is written."""
    param = torch.ones(3, requires_grad=True)
    param.grad = torch.ones(3)
    optimizer = roundpipe_go.AdamW([param])
    optimizer.step()
    values = [t.detach().clone() for t in (param, *optimizer.state[param].values())]
    for name in ("NUM_THREADS", "BACKEND", "SQUARE_ROOT"):
        switch(name, "nonsense")
        with pytest.raises(ValueError, match=name):
            optimizer.step()
        switch(name, "")
    assert all(torch.equal(t, v) for t, v in zip((param, *optimizer.state[param].values()), values))


def test_build_info_tells_what_is_set():
    roundpipe_go.set_num_threads(3)
    roundpipe_go.set_backend("generic")
    info = roundpipe_go.build_info()
    assert info["backend"] == "generic"
    assert info["threads"]["roundpipe_go"] == 3
    assert info["backends"] == list(roundpipe_go.available_backends())
    assert info["torch"] == torch.__version__
    assert json.loads(json.dumps(info)) == info


def test_command_prints_the_same_as_json():
    run = subprocess.run(
        [sys.executable, "-m", "roundpipe_go", "--json"], capture_output=True, text=True, timeout=120, check=True
    )
    info = roundpipe_go.build_info()
    printed = json.loads(run.stdout)
    assert printed.keys() == info.keys()
    for key in ("roundpipe_go", "torch", "cpu", "backends", "arithmetic", "square_root", "square_root_float64", "extension"):
        assert printed[key] == info[key]


def test_a_setting_that_changes_during_the_probe(monkeypatch):
    """What was found out under one setting is not kept under another."""
    from roundpipe_go import _step

    known = {setting: [None, None] for setting in _step.KNOWN}
    monkeypatch.setattr(_step, "KNOWN", known)
    find = _step.torch_arithmetic

    def and_another_thread_sets(*arguments):
        roundpipe_go.set_square_root("ieee")
        return find(*arguments)

    monkeypatch.setattr(_step, "torch_arithmetic", and_another_thread_sets)
    step()
    assert known["ieee"] == [None, None]
    assert known["auto"][0] is not None


@pytest.fixture
def torchrun(monkeypatch):
    """As torchrun starts the first of two processes on a host of eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    ranks = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(1)
    _settings._warn_of_one_thread.cache_clear()
    yield monkeypatch.setenv
    _settings._warn_of_one_thread.cache_clear()


def test_one_thread_by_torchrun_is_said_once(torchrun):
    with pytest.warns(UserWarning, match=r"there are 4 cores for each of 2 .*set_num_threads\(4\)"):
        assert _settings.in_force()[0] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        roundpipe_go.set_num_threads(None)
        assert _settings.in_force()[0] == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("LOCAL_RANK", "1"), ("OMP_NUM_THREADS", "2"), ("LOCAL_WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", ""), (None, None)],
)
def test_one_thread_that_was_chosen_is_not_spoken_of(torchrun, name, value):
    if name is None:
        roundpipe_go.set_num_threads(1)
    else:
        torchrun(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _settings.in_force()[0] == 1
