"""The end of a process: with a step under way, from atexit, from __del__, and while others wait."""

from __future__ import annotations

import pytest

from .processes import passes, run

pytestmark = pytest.mark.slow

UNDER_WAY = """
for i in range(8):  # Go is not loaded yet, so each child has its own
    pid = os.fork()
    if pid == 0:
        break
    end = time.monotonic() + 60
    done = 0
    while not done and time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if not done:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert done and status == 0, f"child {i}: " + (f"status {status}" if done else "hangs")
else:
    print("done")
    sys.exit()

param = torch.zeros(6_000_000, requires_grad=True)
param.grad = torch.ones(6_000_000)
optimizer = roundpipe_go.Adam([param])
roundpipe_go.set_num_threads(1 + i % 3)
started = threading.Event()

def forever():
    while True:
        optimizer.step()
        started.set()

threading.Thread(target=forever, daemon=True).start()
assert started.wait(50)
time.sleep(0.003 * i)
"""


def test_daemon_thread_in_a_step():
    """Eight interpreters end at different moments while a daemon thread is in Go: status 0, no hang, no crash."""
    passes(UNDER_WAY, env={"ROUNDPIPE_GO_SQUARE_ROOT": "ieee"})


LATE = """
import atexit
twins = trained(numel=1000)

class Owner:
    def __init__(self):
        self.param = torch.ones(50_000, requires_grad=True)
        self.param.grad = torch.ones(50_000)
        self.optimizer = roundpipe_go.Adam([self.param])
        self.optimizer.step()
    def __del__(self):
        self.optimizer.step()
        print(name_of(self), flush=True)

name_of = lambda owner: owner.name
early, cycle, late = Owner(), Owner(), Owner()
early.name, cycle.name, late.name = "dropped", "in a cycle", "late"
cycle.itself = cycle
del early, cycle
import gc
gc.collect()
roundpipe_go._kept = late  # goes with its module, when torch's own step raises, and Python says so and goes on
del late
atexit.register(lambda: (twins.train(2), print("at exit", flush=True)))
thread = threading.Thread(target=lambda: (time.sleep(0.2), twins.train(1), print("thread", flush=True)))
thread.start()
print("main", flush=True)
"""


def test_steps_from_atexit_and_finalizers():
    """As late as Python still runs code a step is a step; later it is an exception that Python ignores."""
    outcome = run(LATE)
    assert outcome.status == 0, outcome
    assert outcome.out.split("\n")[:5] == ["dropped", "in a cycle", "main", "thread", "at exit"], outcome
    assert "Fatal" not in outcome.err, outcome


EXIT_IN_STEP = """
twins = trained()
def leave(*_):
    sys.exit(7)
twins.ours.register_step_post_hook(leave)
twins.ours.step()
"""


def test_exit_from_a_hook():
    assert run(EXIT_IN_STEP).status == 7
