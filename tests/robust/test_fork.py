"""Processes: forked at every moment, by every method of multiprocessing, and many at once."""

from __future__ import annotations

import multiprocessing

import pytest

from .processes import passes

pytestmark = pytest.mark.slow

FORKS = """
def child(body, wanted):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                body()
            got = [str(w.message) for w in caught if issubclass(w.category, roundpipe_go.FallbackWarning)]
            assert len(got) == wanted and all("forked" in message for message in got), got
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid

def ends(pid, seconds=40):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, f"child ended with {status}"
            return
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("child hangs")

"""

AT_EVERY_MOMENT = (
    FORKS
    + """
def by_torch(twins):
    twins.ours.step()
    torch.set_num_threads(1)  # or torch's own operations hang: its OpenMP does not survive fork either
    twins.torch.step()
    twins.assert_equal()
    trained(numel=100)
    info = roundpipe_go.build_info()
    assert info["forked"] and "forked" in info["extension"], info

def ready(numel=700_001):
    twins = trained(numel=numel)
    generator = torch.Generator().manual_seed(1)
    twins.set_grads([randn_like(param, generator) for param in twins.params])
    return twins

# Imported, but Go is not loaded: the child has a runtime of its own, and its child has what is described next.
def grandchild():
    twins = ready()
    ends(child(lambda: by_torch(twins), 1))
ends(child(grandchild, 0))

twins, small = ready(), ready(100)
for _ in range(3):
    ends(child(lambda: by_torch(twins), 1))
twins.train(1)  # the parent goes on from where it was

# In the middle of a step of another thread, of every kind: one core's, several cores', goroutines'.
from roundpipe_go import _binding
done = threading.Event()
def keep_stepping(numel):
    param = torch.zeros(numel, requires_grad=True)
    param.grad = torch.ones(numel)
    optimizer = roundpipe_go.Adam([param])
    while not done.is_set():
        optimizer.step()
threads = [threading.Thread(target=keep_stepping, args=(numel,)) for numel in (6_000_000, 20_000)]
for thread in threads:
    thread.start()
for i in range(FORKS):
    time.sleep(0.001 * (i % 7))
    if i == FORKS // 2:
        _binding._module().SetTeam(0, 0, 0)
    ends(child(lambda: by_torch(small), 1))
done.set()
for thread in threads:
    thread.join()
twins.train(1)
print("done")
"""
)


def test_fork_at_every_moment():
    """Before Go is loaded the child computes in Go; after, by torch and with one warning. It never enters Go, and never hangs."""
    passes(AT_EVERY_MOMENT.replace("FORKS", "40"), env={"OMP_NUM_THREADS": "2"})


MANY = (
    FORKS
    + """
import hashlib
def train(i):
    twins = trained(4, amsgrad=True)
    image = twins.params[0].detach().numpy().tobytes()
    with open(f"{sys.argv[2]}/{i}", "w") as file:
        file.write(hashlib.sha256(image).hexdigest())
count = int(sys.argv[1])
pids = [child(lambda i=i: train(i), 0) for i in range(count)]
for pid in pids:
    ends(pid, 150)
digests = {open(f"{sys.argv[2]}/{i}").read() for i in range(count)}
assert len(digests) == 1, digests
print("done")
"""
)


PARALLEL_BEFORE = (
    FORKS
    + """
import multiprocessing
torch.ones(200_000) + 1  # OpenMP has threads now, which the children have not
def first(dtype):
    param = torch.ones(3, dtype=dtype).requires_grad_()
    param.grad = torch.ones_like(param)
    roundpipe_go.Adam([param]).step()
    assert 0.998 < param[0].item() < 0.9995
def report():
    roundpipe_go.build_info()
fork = multiprocessing.get_context("fork")
works = [(first, (torch.float32,)), (first, (torch.float64,)), (report, ())]
for work, arguments in works:
    child = fork.Process(target=work, args=arguments)
    child.start()
    child.join(100)
    assert child.exitcode == 0, (work, arguments, child.exitcode)
twins = trained(1)
child = fork.Process(target=report)
child.start()
child.join(100)
assert child.exitcode == 0, "report after a step"
print("done")
"""
)


IMPORTED_IN_THE_CHILD = """
import multiprocessing, torch
torch.set_num_threads(2)
torch.ones(200_000) + 1
def first(dtype):
    import roundpipe_go
    param = torch.ones(3, dtype=dtype).requires_grad_()
    param.grad = torch.ones_like(param)
    roundpipe_go.Adam([param]).step()
    assert 0.998 < param[0].item() < 0.9995
    roundpipe_go.build_info()
for dtype in (torch.float32, torch.float64):
    child = multiprocessing.get_context("fork").Process(target=first, args=(dtype,))
    child.start()
    child.join(100)
    assert child.exitcode == 0, (dtype, child.exitcode)
print("done")
"""


def test_first_step_in_a_child_of_a_parent_that_ran_in_parallel():
    """The looks at torch's arithmetic are torch's operations as well, and must not wait for the parent's threads."""
    passes(PARALLEL_BEFORE)
    passes(IMPORTED_IN_THE_CHILD, prelude=False)


@pytest.mark.parametrize("count", [2, 8])
def test_processes_at_once(count, tmp_path):
    """Each with its own Go runtime and all of torch's threads, on cores that all of them want."""
    passes(MANY, str(count), str(tmp_path))


WORKERS = """
import multiprocessing
from torch.utils.data import DataLoader
from robust import workers

method = sys.argv[1]
twins = trained()  # Go is loaded
context = multiprocessing.get_context(method)
loader = DataLoader(workers.Stepping(6), batch_size=1, num_workers=2, multiprocessing_context=method, timeout=250)
want = workers.weights(7)
batches = 0
for index, weights, by_torch in loader:
    assert_equal_bits(weights[0], workers.weights(int(index)), f"item {int(index)}")
    assert bool(by_torch) == (method == "fork"), (method, by_torch)
    twins.train(1)
    batches += 1
assert batches == 6
# In a forked child torch's own operations hang on more than one thread, as those of the training here would.
with context.Pool(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
    for got in pool.map_async(workers.weights, [7, 7, 7, 7], chunksize=1).get(100):
        assert_equal_bits(got, want, "from the pool")
    pool.close()
    pool.join()
twins.train(1)
print("done")
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_that_step(method):
    """DataLoader's workers and pools, beside a parent that steps."""
    assert method in multiprocessing.get_all_start_methods()
    passes(WORKERS, method)


TORCHRUN = """
from torch.distributed.run import main
where = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
main(["--nproc-per-node=2", *where, "-m", "robust.workers"])
print("done")
"""


def test_under_torchrun():
    """It gives each process one thread, and so do we; the launcher says so."""
    outcome = passes(TORCHRUN, env={"OMP_NUM_THREADS": None}, prelude=False)
    assert outcome.out.count("rank done with 1 thread") == 2, outcome
    assert "OMP_NUM_THREADS" in outcome.err, outcome
