"""Many threads: one optimizer stepped by two, many stepped at once, and what others see and lose meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

import roundpipe_go
from oracle import assert_equal_bits

from .processes import passes


def big(numel: int = 12_000_000) -> torch.optim.Optimizer:
    param = torch.linspace(-1, 1, numel).requires_grad_()
    param.grad = torch.ones(numel)
    optimizer = roundpipe_go.AdamW([param], lr=0.01)
    optimizer.step()
    return optimizer


def in_threads(*targets: Callable[[], None]) -> None:
    """Runs them at once; the first exception is raised here."""
    failures: list[BaseException] = []

    def call(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


def test_one_optimizer_from_two_threads():
    """A clear error for the second, which has done nothing; every step that was taken counts."""
    optimizer, want = big(), big()
    done, taken, refused = threading.Event(), [], []

    def step() -> None:
        while not done.is_set():
            try:
                optimizer.step()
                taken.append(1)
            except RuntimeError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=step) for _ in range(3)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    while time.monotonic() < end and (len(refused) < 5 or len(taken) < 30):
        time.sleep(0.01)
    done.set()
    for thread in threads:
        thread.join()
    assert len(taken) >= 30
    assert len(refused) >= 5
    assert all("another thread" in text for text in refused), set(refused)
    for _ in taken:
        want.step()
    (param,), (other,) = optimizer.param_groups[0]["params"], want.param_groups[0]["params"]
    assert optimizer.state[param]["step"].item() == len(taken) + 1
    assert_equal_bits(param, other, f"param after {len(taken)} steps and {len(refused)} refusals")


STRESS = """
sys.setswitchinterval(1e-6)
torch.set_num_threads(1)
param = torch.ones((1 << 21) + 64, requires_grad=True)  # just too long to keep the GIL
param.grad = torch.ones_like(param)
optimizer = roundpipe_go.Adam([param])
optimizer.step()
done, taken, refused = threading.Event(), [0] * 4, [0] * 4

def step(i):
    while not done.is_set():
        try:
            optimizer.step()
            taken[i] += 1
        except RuntimeError:
            refused[i] += 1
threads = [threading.Thread(target=step, args=(i,)) for i in range(4)]
for thread in threads:
    thread.start()
time.sleep(8)
done.set()
for thread in threads:
    thread.join()
assert sum(taken) > 50 and sum(refused) > 50, (taken, refused)
state = optimizer.state[param]
assert state["step"].item() == 1 + sum(taken), (state["step"], taken)
for tensor in (param.detach(), state["exp_avg"], state["exp_avg_sq"]):
    assert tensor.unique().numel() == 1
print("done")
"""


def test_threads_that_interrupt_each_other_everywhere():
    """Native steps and the way by which a step is refused, as Python changes threads after each microsecond."""
    passes(STRESS)


def test_turns_are_no_crime():
    """Threads that step one optimizer one after the other, as a pool does."""
    optimizer, lock = big(1000), threading.Lock()

    def step() -> None:
        for _ in range(200):
            with lock:
                optimizer.step()

    in_threads(*[step] * 4)
    (state,) = optimizer.state.values()
    assert state["step"].item() == 801


def test_a_refused_step_leaves_the_next_alone():
    """After an exception in a step of one thread another thread may step."""
    optimizer = big(1000)
    (param,) = optimizer.param_groups[0]["params"]

    def fail() -> None:
        optimizer.param_groups[0]["betas"] = (0.9,)
        with pytest.raises(ValueError, match="unpack"):
            optimizer.step()
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)

    in_threads(fail)
    optimizer.step()
    assert optimizer.state[param]["step"].item() == 2


STAY = """
torch.set_num_threads(8)
twins = trained(2, numel=70_000)
roundpipe_go.set_num_threads(3)
tasks = lambda: set(os.listdir("/proc/self/task"))
(torch.ones(1 << 20) + 1).sum()
before = tasks()
for _ in range(20):
    twins.train(1)
    (torch.ones(1 << 20) + 1).sum()
assert len(before) > 7, before
assert before <= tasks(), "threads have ended"
print("done")
"""


def test_the_threads_of_torch_stay():
    """OpenMP ends the threads that a smaller team leaves out, and torch's next operation would have to start others."""
    passes(STAY)


IDLE = """
def spent(seconds):
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before
from roundpipe_go import _binding
for team in ("torch's threads", "goroutines"):
    twins = trained(4)
    if team == "goroutines":
        _binding._module().SetTeam(0, 0, 0)
        twins.train(3)
    time.sleep(0.5)  # libgomp's threads spin for a while after each of torch's operations
    idle = min(spent(0.5) for _ in range(4))
    assert idle < 0.005, f"{team}: {idle} s of 0.5"
print("done")
"""


@pytest.mark.slow
def test_an_idle_process_takes_no_time():
    """After steps nobody waits by spinning."""
    passes(IDLE)


def rate(targets: int, numel: int, seconds: float) -> float:
    """Elements a second that so many threads update together, each with an optimizer of its own."""
    done, counted = threading.Event(), [0] * targets
    optimizers = [big(numel) for _ in range(targets)]

    def step(i: int) -> Callable[[], None]:
        def keep_on() -> None:
            while not done.is_set():
                optimizers[i].step()
                counted[i] += numel

        return keep_on

    timer = threading.Timer(seconds, done.set)
    timer.start()
    begin = time.monotonic()
    in_threads(*[step(i) for i in range(targets)])
    assert min(counted) > 0, counted
    return sum(counted) / (time.monotonic() - begin)


@pytest.mark.slow
@pytest.mark.parametrize("numel", [2_000, 600_000])
def test_throughput_under_contention(numel):
    """Eight threads together do not get much less done than one. They would if they waited for each other by spinning."""
    for _ in range(3):  # other processes come and go
        alone, together = rate(1, numel, 1.5), rate(8, numel, 1.5)
        if together > 0.5 * alone:
            return
    raise AssertionError(f"{numel} elements: {together:.3g} a second in eight threads, {alone:.3g} in one")


def test_state_dict_while_another_thread_steps():
    """Taken at any moment it has all keys of all parameters, and loads. Its tensors are the live ones, as torch's are."""
    optimizer = roundpipe_go.AdamW([torch.ones(n, requires_grad=True) for n in (400_000, 7, 1000)], amsgrad=True)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    done = threading.Event()

    def step() -> None:
        while not done.is_set():
            optimizer.step()

    def save() -> None:
        try:
            for _ in range(150):
                taken = optimizer.state_dict()
                assert list(taken["state"]) == [0, 1, 2]
                for entry in taken["state"].values():
                    assert list(entry) == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
                other = roundpipe_go.AdamW([torch.ones(n, requires_grad=True) for n in (400_000, 7, 1000)], amsgrad=True)
                other.load_state_dict(taken)
        finally:
            done.set()

    in_threads(step, save)


def test_copies_taken_by_hooks_are_whole():
    """A hook runs between steps: what it copies is one moment's, while other threads step other optimizers."""
    optimizer, other, done = big(500_000), big(500_000), threading.Event()
    (param,) = optimizer.param_groups[0]["params"]
    copies = []

    def copy(*_: object) -> None:
        state = optimizer.state[param]
        copies.append((state["step"].item(), param.detach()[::1000].clone(), state["exp_avg"][::1000].clone()))

    def disturb() -> None:
        while not done.is_set():
            other.step()

    def train() -> None:
        for _ in range(20):
            optimizer.step()
        done.set()

    with optimizer.register_step_post_hook(copy):
        in_threads(disturb, train)
    want = big(500_000)
    (same,) = want.param_groups[0]["params"]
    for count, values, moments in copies:
        want.step()
        assert want.state[same]["step"].item() == count
        assert_equal_bits(values, same.detach()[::1000], f"param at {count}")
        assert_equal_bits(moments, want.state[same]["exp_avg"][::1000], f"exp_avg at {count}")


FORKED = """
optimizer = roundpipe_go.AdamW([torch.zeros(4_000_000, requires_grad=True)])
(param,) = optimizer.param_groups[0]["params"]
param.grad = torch.ones_like(param)
roundpipe_go.set_num_threads(1)
roundpipe_go.set_backend("generic")
optimizer.step()
done = threading.Event()
def step():
    while not done.is_set():
        optimizer.step()
thread = threading.Thread(target=step, daemon=True)
thread.start()
warnings.simplefilter("ignore")
for i in range(4):
    time.sleep(0.03)
    pid = os.fork()
    if pid == 0:
        optimizer.step()
        optimizer.step()
        os._exit(0)
    end, ended = time.monotonic() + 60, 0
    while not ended and time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert ended and status == 0, "child hangs" if not ended else f"child: {status}"
done.set()
thread.join()
print("done")
"""


@pytest.mark.slow
def test_child_steps_what_the_parent_was_stepping():
    """Forked in the middle of a step: the thread that was in it is not in the child, and does not keep its place there."""
    passes(FORKED)


AUTOGRAD = """
# One optimizer a parameter, stepped by autograd's own threads, several backwards at once, beside a plain one.
import torch.autograd
models = [torch.nn.Sequential(*[torch.nn.Linear(60, 60) for _ in range(4)]) for _ in range(4)]
twins_ = [torch.nn.Sequential(*[torch.nn.Linear(60, 60) for _ in range(4)]) for _ in range(4)]
for model, twin in zip(models, twins_):
    twin.load_state_dict(model.state_dict())
def hooked(model, cls):
    for param in model.parameters():
        optimizer = cls([param], lr=0.01)
        def step(param, optimizer=optimizer):
            optimizer.step()
            param.grad = None
        param.register_post_accumulate_grad_hook(step)
def train(model):
    for i in range(15):
        model(torch.linspace(-1, 1, 600).reshape(10, 60)).square().mean().backward()
for model, twin in zip(models, twins_):
    hooked(model, roundpipe_go.AdamW)
    hooked(twin, torch.optim.AdamW)
torch.set_num_threads(1)  # for the same gradients in the twin's turn
roundpipe_go.set_num_threads(2)
threads = [threading.Thread(target=train, args=(model,)) for model in models]
side = trained(numel=100_000)
for thread in threads:
    thread.start()
side.train(10)
for thread in threads:
    thread.join()
for model, twin in zip(models, twins_):
    train(twin)
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
print("done")
"""


@pytest.mark.slow
def test_autograd_in_many_threads():
    passes(AUTOGRAD)
