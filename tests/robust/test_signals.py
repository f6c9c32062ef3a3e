"""Signals: the user's handlers stay the user's, storms do no harm, and what a handler sees of the state is whole."""

from __future__ import annotations

import random
import signal
import time

import pytest

from .processes import Process, passes

pytestmark = pytest.mark.slow

HANDLERS = """
names = "USR1 TERM ALRM USR2 CHLD INT PROF HUP URG PIPE"
numbers = [getattr(signal, f"SIG{name}") for name in names.split()]
early, late, got = numbers[::2], numbers[1::2], []
handler = lambda number, frame: got.append(number)
untouched = {n: signal.getsignal(n) for n in signal.valid_signals() if n not in numbers}
for number in early:
    signal.signal(number, handler)
twins = trained()
for number in late:
    signal.signal(number, handler)
for round in range(3):
    for number in numbers:
        del got[:]
        os.kill(os.getpid(), number)
        twins.train(1, seed=round)
        assert got.count(number) == 1, (number, got)
        assert signal.getsignal(number) is handler
for number, known in untouched.items():
    assert signal.getsignal(number) == known, number
# A closed pipe is an exception, as Python has it, not the end.
for number in numbers:
    signal.signal(number, signal.SIG_DFL if number != signal.SIGPIPE else signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.default_int_handler)
reader, writer = os.pipe()
os.close(reader)
try:
    os.write(writer, b"x")
    raise AssertionError("nothing was raised")
except BrokenPipeError:
    pass
twins.train(1)
print("done")
"""


def test_handlers_stay_the_users():
    """Set before the first step or after it: each is called, by one signal once, and no other disposition changes."""
    passes(HANDLERS)


STORM = """
got = {}
def handler(number, frame):
    got[number] = got.get(number, 0) + 1
for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGVTALRM, signal.SIGCHLD, signal.SIGUSR1):
    signal.signal(number, handler)
twins = trained()
signal.signal(signal.SIGURG, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
done = threading.Event()
def send():
    while not done.is_set():
        for number in (signal.SIGCHLD, signal.SIGURG, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        time.sleep(0.0003)
thread = threading.Thread(target=send)
thread.start()
end, steps = time.monotonic() + SECONDS, 0
small = trained(numel=1000, amsgrad=True)
while time.monotonic() < end:
    twins.train(1, seed=steps)
    small.train(5, seed=steps)
    if steps % 20 == 0:
        os.spawnlp(os.P_WAIT, "true", "true")
    steps += 1
for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF, signal.ITIMER_VIRTUAL):
    signal.setitimer(timer, 0)
done.set()
thread.join()
assert steps > 3, steps
assert len(got) == 6 and min(got.values()) > 50, got
print(steps, got, "done")
"""


def test_storm():
    """Six kinds of signals, thousands a second, while steps on one core and on all keep torch's bits."""
    passes(STORM.replace("SECONDS", "8"))


URGENT = """
got = []
signal.signal(signal.SIGURG, lambda *_: got.append(1))
twins = trained()
for _ in range(3):
    os.kill(os.getpid(), signal.SIGURG)
    twins.train(1)
assert len(got) == 3, got
print("done")
"""


def test_a_handler_of_sigurg_set_before():
    """Go takes this one signal for itself when it is loaded; it is given back."""
    passes(URGENT)


SNAPSHOT = """
# The last element of every tensor as it is after each step.
def run(optimizer, steps):
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
def fresh():
    return roundpipe_go.AdamW([torch.full((n,), 1.0, requires_grad=True) for n in (700_001, 9, 40_000)], lr=0.01, amsgrad=True)
def look(optimizer):
    state = optimizer.state_dict()["state"]
    return tuple(x for i, param in enumerate(optimizer.param_groups[0]["params"])
                 for x in (param[-1].item(), *(value.flatten()[-1].item() for value in state[i].values())))
optimizer = fresh()
wanted = {}
for step in range(1, STEPS + 1):
    run(optimizer, 1)
    wanted[step] = look(optimizer)
optimizer, seen, wrong = fresh(), [], []
run(optimizer, 1)
def handler(number, frame):
    now = look(optimizer)
    seen.append(now)
    if now not in whole:
        wrong.append((now, frame.f_code.co_name))
whole = set(wanted.values())
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0011, 0.0011)
run(optimizer, STEPS - 1)
signal.setitimer(signal.ITIMER_REAL, 0)
assert not wrong, (wrong[:2], len(wrong), len(seen))
assert len(seen) > 50 and len(set(seen)) > 30, (len(seen), len(set(seen)))
assert look(optimizer) == wanted[STEPS]
print(len(seen), "done")
"""


def test_state_as_a_handler_sees_it_is_whole():
    """A checkpoint written by a SIGTERM handler has all of a step or nothing, wherever the signal comes."""
    passes(SNAPSHOT.replace("STEPS", "300"))


CTRL_C = """
optimizer = roundpipe_go.AdamW([torch.linspace(-1, 1, n).requires_grad_() for n in (300_000, 35)], lr=0.01)
twin = roundpipe_go.AdamW([torch.linspace(-1, 1, n).requires_grad_() for n in (300_000, 35)], lr=0.01)
def step(optimizer):
    for param in optimizer.param_groups[0]["params"]:
        param.grad.fill_(0.5)
    optimizer.step()
for each in (optimizer, twin):
    for param in each.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
step(optimizer)
print("ready", flush=True)
interrupts = 0
while interrupts < 25:
    try:
        while True:
            step(optimizer)
    except KeyboardInterrupt:
        interrupts += 1
        counts = {state["step"].item() for state in optimizer.state.values()}
        assert len(counts) == 1, counts
        print("interrupted", flush=True)
signal.signal(signal.SIGINT, signal.SIG_IGN)
(count,) = counts
for _ in range(int(count)):
    step(twin)
for ours, theirs in zip(optimizer.param_groups[0]["params"], twin.param_groups[0]["params"]):
    assert_equal_bits(ours, theirs, f"after {count} steps and {interrupts} interrupts")
print(count, "done")
"""


def test_ctrl_c():
    """KeyboardInterrupt comes soon, and the steps counted are the steps done."""
    with Process(CTRL_C) as process:
        assert process.line().strip() == "ready"
        generator, slowest = random.Random(1), 0.0
        for _ in range(25):
            time.sleep(0.02 * generator.random())
            start = time.monotonic()
            process.send(signal.SIGINT)
            assert process.line().strip() == "interrupted"
            slowest = max(slowest, time.monotonic() - start)
        outcome = process.end()
    assert outcome.status == 0, outcome
    assert outcome.out.endswith("done"), outcome
    assert slowest < 5, f"{slowest:.1f} s until KeyboardInterrupt"


FOREVER = """
twins = trained()
print("ready", flush=True)
while True:
    twins.ours.step()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_deadly_signal_is_deadly(number):
    """Nobody holds it back, and the status tells which one it was."""
    with Process(FOREVER) as process:
        assert process.line().strip() == "ready"
        time.sleep(0.1)
        process.send(number)
        outcome = process.end(60)
    assert outcome.status == -number, outcome
