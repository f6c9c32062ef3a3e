"""Processes under test: each ends in time, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

PRELUDE = """\
import os, signal, sys, threading, time, warnings
import torch, roundpipe_go
from oracle import Twins, assert_equal_bits, randn_like
warnings.simplefilter("error", roundpipe_go.FallbackWarning)

def params(numel=700_001):
    return [torch.linspace(-1, 1, numel).requires_grad_(), torch.linspace(-1, 1, 35).reshape(5, 7).requires_grad_()]

def trained(steps=3, numel=700_001, **options):
    twins = Twins(lambda: params(numel), lr=0.01, **options)
    twins.train(steps)
    return twins
"""
"""What scripts begin with: twins compare every bit with torch's, and a step that torch computes is an error."""

GRACE = 10
"""Seconds in which the helpers of a process that has ended must follow: multiprocessing's notice its end by a closed pipe."""


@dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Attributes:
        status: its exit status, or minus the signal that ended it.
        out: what it printed, without the space around it.
        err: what it printed to stderr.
        seconds: how long it ran.
    """

    status: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        return f"status {self.status} after {self.seconds:.1f} s\n{self.out[-3000:]}\n{self.err[-6000:]}"


class Process:
    """A Python script in a session of its own.

    Args:
        script: the code.
        arguments: of the script.
        wrap: a command that starts it, such as ``unshare --net``.
        env: environment variables beside the present ones; None removes one.
        before: called in the new process before Python starts there.
        cwd: where it starts.
        prelude: whether ``PRELUDE`` goes before the code.
    """

    def __init__(
        self,
        script: str,
        *arguments: str,
        wrap: Sequence[str] = (),
        env: dict[str, str | None] | None = None,
        before: Callable[[], None] | None = None,
        cwd: Path | None = None,
        prelude: bool = True,
    ) -> None:
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
        for name, value in (env or {}).items():
            if value is None:
                variables.pop(name, None)
            else:
                variables[name] = value
        self._start = time.monotonic()
        self._popen = subprocess.Popen(
            [*wrap, sys.executable, "-c", PRELUDE * prelude + script, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=variables,
            preexec_fn=before,
            cwd=cwd,
            start_new_session=True,
        )
        self.pid = self._popen.pid

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing of it outlives the test."""
        if self._popen.poll() is None:
            self.kill()
            self._popen.communicate()

    def send(self, number: int) -> None:
        """Sends it a signal."""
        self._popen.send_signal(number)

    def line(self) -> str:
        """Waits for the next line that it prints."""
        return self._popen.stdout.readline()

    def end(self, timeout: float = 300) -> Outcome:
        """Waits for its end, soon after which nothing of its session may be left.

        Raises:
            AssertionError: it does not end in time, or leaves processes behind. They have been killed.
        """
        try:
            out, err = self._popen.communicate(timeout=timeout)
            soon = time.monotonic() + GRACE
            while time.monotonic() < soon and _session(self.pid):
                time.sleep(0.02)
        except subprocess.TimeoutExpired:
            stacks = _stacks(self.pid)
            self.kill()
            out, err = self._popen.communicate()
            raise AssertionError(f"hangs, for {timeout} s\n{out[-2000:]}\n{err[-3000:]}\n{stacks}") from None
        finally:
            left = self.kill()
        assert not left, f"left behind: {left}\n{out}\n{err}"
        return Outcome(self._popen.returncode, out.strip(), err, time.monotonic() - self._start)

    def kill(self) -> list[str]:
        """Kills what is alive of its session; says what that was."""
        left = []
        for pid in _session(self.pid):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                left.append(f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes()[:200]!r}")
                os.kill(pid, signal.SIGKILL)
        return left


def run(script: str, *arguments: str, timeout: float = 300, **options) -> Outcome:
    """Runs a script to its end; see ``Process``."""
    return Process(script, *arguments, **options).end(timeout)


def passes(script: str, *arguments: str, timeout: float = 300, **options) -> Outcome:
    """Runs a script that must end with status 0 and print "done" last."""
    outcome = run(script, *arguments, timeout=timeout, **options)
    assert outcome.status == 0, outcome
    assert outcome.out.endswith("done"), outcome
    return outcome


def _session(leader: int) -> list[int]:
    """The living processes of a session, by /proc."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state not in "ZX":
                    pids.append(int(folder.name))
    return pids


def _stacks(leader: int) -> str:
    """Where the threads of a session wait in the kernel: what is known of a hang."""
    lines = []
    for pid in _session(leader):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                lines.append(f"{pid} {task.name} {(task / 'comm').read_text().strip()} {(task / 'wchan').read_text()}")
    return "\n".join(lines)
