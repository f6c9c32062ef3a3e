"""Backends as a fixture, a report of which ones ran, and silence: a served step must not warn."""

from __future__ import annotations

import os

import pytest
import torch

import roundpipe_go
from roundpipe_go import _fallback, _settings

REQUIRE = "ROUNDPIPE_GO_REQUIRE_BACKENDS"
"""Environment variable: backends, comma-separated, without which the run is an error. A green run cannot mean "not tried"."""

BACKENDS = roundpipe_go.available_backends()
_exercised: set[str] = set()


def _required() -> list[str]:
    return [name for name in os.environ.get(REQUIRE, "").split(",") if name]


def pytest_configure(config):
    # Any fallback that a test does not ask for is a failure: else parity would compare torch with torch.
    config.addinivalue_line("filterwarnings", "error::roundpipe_go.FallbackWarning")
    missing = [name for name in _required() if name not in BACKENDS]
    if missing:
        raise pytest.UsageError(f"{REQUIRE} asks for {', '.join(missing)}; this CPU has {', '.join(BACKENDS)}")


def pytest_report_header():
    info = roundpipe_go.build_info()
    return [
        f"roundpipe_go: backends {', '.join(BACKENDS)}; arithmetic {info['arithmetic']}; "
        f"square root {info['square_root']}, of float64 {info['square_root_float64']}",
        f"torch: {info['torch']}; capability {info['torch_cpu_capability']}; {torch.get_num_threads()} threads",
    ]


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.OK and _not_exercised(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(f"backends exercised: {', '.join(b for b in BACKENDS if b in _exercised) or 'none'}")
    missing = _not_exercised(config)
    if missing:
        terminalreporter.write_line(f"ERROR: {REQUIRE} asks for {', '.join(missing)}, which no test ran", red=True)


def _not_exercised(config) -> list[str]:
    return [] if config.option.collectonly else [name for name in _required() if name not in _exercised]


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    # Last, so that the backends of a case follow each other and share what torch computed for it.
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS, indirect=True)


@pytest.fixture
def backend(request) -> str:
    """Runs the test once per backend that this CPU has."""
    roundpipe_go.set_backend(request.param)
    assert roundpipe_go.get_backend() == request.param
    yield request.param
    _exercised.add(request.param)


def forget_switches() -> None:
    _settings._switch.cache_clear()
    _settings._in_force = None


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """Every test starts with no reason warned about, and leaves the settings as they were."""
    monkeypatch.setattr(_fallback, "_warned", set())
    threads = torch.get_num_threads()
    yield
    forget_switches()
    torch.set_num_threads(threads)
    roundpipe_go.set_num_threads(None)
    roundpipe_go.set_backend(None)
    roundpipe_go.set_square_root(None)


@pytest.fixture
def switch(monkeypatch):
    """Sets one of our variables in the environment, as if the process had begun with it."""

    def set_to(name: str, value: str) -> None:
        monkeypatch.setenv(f"ROUNDPIPE_GO_{name}", value)
        forget_switches()

    return set_to
