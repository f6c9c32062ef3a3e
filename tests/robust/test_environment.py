"""Where a process finds itself: masks, quotas, limits, allocators, missing folders, other libraries."""

from __future__ import annotations

import ctypes.util
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from .processes import passes, run

pytestmark = pytest.mark.slow

TRAIN = """
twins = trained(amsgrad=True)
twins.train(2)
print(roundpipe_go.build_info()["threads"], "done")
"""

# ---- cores and threads

VARIABLES = {
    "bound": {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores", "GOMAXPROCS": "1"},
    "spread": {"OMP_PROC_BIND": "true", "OMP_WAIT_POLICY": "passive", "ROUNDPIPE_GO_NUM_THREADS": "7"},
    "limited": {"OMP_THREAD_LIMIT": "1", "OMP_DYNAMIC": "true", "ROUNDPIPE_GO_NUM_THREADS": "4", "GOMAXPROCS": "64"},
    "one": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOGC": "1", "GODEBUG": "asyncpreemptoff=1,cpu.avx512f=off"},
    "collecting": {"GOGC": "1", "GODEBUG": "gcstoptheworld=1,madvdontneed=1", "MALLOC_PERTURB_": "165", "OMP_STACKSIZE": "64k"},
}


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_of_openmp_and_go(name):
    """Whatever they say of threads, the bits are torch's."""
    passes(TRAIN, env=VARIABLES[name])


AFFINITY = """
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cores[-1:])
twins = trained()
assert os.sched_getaffinity(0) == set(cores[-1:])
roundpipe_go.set_num_threads(4)  # more than the mask has
twins.train(2)
os.sched_setaffinity(0, cores)
twins.train(2)
assert os.sched_getaffinity(0) == set(cores), "the mask is the user's"
print("done")
"""


def test_affinity_mask():
    """One core at the start, all later, and back: steps go on and leave the mask alone."""
    passes(AFFINITY)


@pytest.fixture
def quota():
    """A control group with a fifth of a core; its list of processes."""
    folder = Path("/sys/fs/cgroup/cpu/roundpipe_go_test")
    if not os.access(folder.parent, os.W_OK):
        pytest.skip("needs a cgroup v1 cpu controller that may be written")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        (folder / "cpu.cfs_period_us").write_text("20000")
        (folder / "cpu.cfs_quota_us").write_text("6000")
        yield folder / "tasks"
    finally:
        folder.rmdir()


QUOTA = """
twins = trained()
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))  # this thread alone
for task in os.listdir("/proc/self/task"):
    with open(sys.argv[1], "w") as file:
        file.write(task)
twins.train(3)
print("done")
"""


def test_cpu_quota(quota):
    """Threads that are stopped in the middle of a step, again and again."""
    passes(QUOTA, str(quota))


# ---- limits

LIMITED = """
import resource
param = torch.zeros(50_000, requires_grad=True)
param.grad = torch.ones(50_000)
optimizer = roundpipe_go.Adam([param])
kind, limit = getattr(resource, sys.argv[1]), int(sys.argv[2])
if sys.argv[1] == "RLIMIT_AS":
    with open("/proc/self/statm") as file:
        limit += int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(kind, (limit, limit))
print("limited", flush=True)
optimizer.step()
optimizer.step()
print("done")
"""


@pytest.mark.parametrize("megabytes", [4, 64, 600, 4000])
def test_little_address_space(megabytes):
    """Go reserves address space when it is loaded. Where there is none the process says so and ends; it does not hang."""
    outcome = run(LIMITED, "RLIMIT_AS", str(megabytes << 20), timeout=60)
    assert "limited" in outcome.out, outcome
    if outcome.out.endswith("done"):
        assert outcome.status == 0, outcome
    else:
        assert outcome.status != 0, outcome
        assert outcome.err.strip(), "it ended without a word"
    if megabytes == 4000:
        assert outcome.status == 0, outcome


NO_THREADS = """
import resource
param = torch.zeros(50_000, requires_grad=True)
param.grad = torch.ones(50_000)
optimizer = roundpipe_go.Adam([param])
torch.sqrt(torch.ones(400_000))  # OpenMP has its threads
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
if os.getuid() == 0:
    os.setuid(65534)  # root has no such limit
    os.stat(os.path.dirname(roundpipe_go.__file__))
print("limited", flush=True)
optimizer.step()
print("done")
"""


def test_no_more_threads():
    """ulimit -u: Go cannot start its threads. An end with words, or success, but no hang."""
    outcome = run(NO_THREADS)
    assert outcome.out.startswith("limited"), outcome
    if outcome.out.endswith("done"):
        assert outcome.status == 0, outcome
    else:
        assert outcome.status != 0, outcome
        assert outcome.err.strip(), "it ended without a word"


SMALL_STACKS = """
threading.stack_size(64 << 10)
failures = []
def train():
    try:
        param = torch.ones(300_000, requires_grad=True)
        param.grad = torch.ones(300_000)
        optimizer = roundpipe_go.AdamW([param], amsgrad=True)
        for _ in range(20):
            optimizer.step()
        assert optimizer.state[param]["step"].item() == 20
    except BaseException as error:
        failures.append(error)
trained()
for _ in range(30):
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
assert not failures, failures
print("done")
"""


def test_small_stacks():
    """ulimit -s of 256 kB, and Python threads of 64 kB: C and Go need little of the caller's stack."""
    passes(SMALL_STACKS, before=lambda: resource.setrlimit(resource.RLIMIT_STACK, (256 << 10, 256 << 10)))


OUT_OF_MEMORY = """
import resource
def optimizer_of(numel):
    params = [torch.full((numel,), 0.5, requires_grad=True) for _ in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    return roundpipe_go.AdamW(params, lr=0.1, amsgrad=True)
trained()
optimizer = optimizer_of(4_000_000)  # 192 MB of state
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
refusals = 0
for room in (8, 24, 40, 70, 100, 150):
    resource.setrlimit(resource.RLIMIT_AS, (used + (room << 20), -1))
    try:
        optimizer.step()
    except (MemoryError, RuntimeError) as error:
        refusals += 1
        assert "memory" in str(error).lower(), error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    assert all(torch.all(param == 0.5) for param in optimizer.param_groups[0]["params"]) or refusals == 0
assert refusals >= 5, refusals
optimizer.step()
want = optimizer_of(10)
want.step()
for param in optimizer.param_groups[0]["params"]:
    assert torch.equal(param[:10], want.param_groups[0]["params"][0]), (param[:3], want.param_groups[0]["params"][0][:3])
    assert optimizer.state[param]["step"].item() == 1
print("done")
"""


def test_out_of_memory_while_state_is_made():
    """torch raises, nothing has changed, and with memory the very same optimizer takes its first step."""
    passes(OUT_OF_MEMORY)


# ---- the system around it

BARE = """
import torch._dynamo  # the first optimizer imports it, for which torch needs a folder
os.rmdir(os.getcwd())
trained().train(2)
print("done")
"""


def test_nothing_around(tmp_path):
    """A deleted folder, no HOME, no PATH, no folder for temporary files, an odd language."""
    bare = dict.fromkeys(os.environ)
    bare.pop("PYTHONPATH", None)
    folder = tmp_path / "gone"
    folder.mkdir()
    passes(BARE, env={**bare, "HOME": "/nonexistent", "TMPDIR": "/nonexistent", "LC_ALL": "no_SUCH.language"}, cwd=folder)


@pytest.fixture
def locales(tmp_path):
    """A folder with locales whose numbers have a decimal comma, and whose capital of i is none in ASCII."""
    if shutil.which("localedef") is None:
        pytest.skip("needs localedef")
    for name in ("de_DE", "tr_TR"):
        made = subprocess.run(
            ["localedef", "-i", name, "-f", "UTF-8", tmp_path / f"{name}.UTF-8"], capture_output=True, check=False
        )
        if made.returncode > 1:
            pytest.skip(f"localedef cannot make {name}: {made.stderr.decode().strip()}")
    return tmp_path


LOCALE = """
import locale
for name in ("de_DE.UTF-8", "tr_TR.UTF-8"):
    locale.setlocale(locale.LC_ALL, name)
    trained().train(2)
    roundpipe_go.build_info()
    assert locale.setlocale(locale.LC_ALL) == name
assert locale.localeconv()["decimal_point"] == ","
print("done")
"""


def test_locale(locales):
    passes(LOCALE, env={"LOCPATH": str(locales), "LC_ALL": "tr_TR.UTF-8"})


def unshared(*options: str) -> list[str]:
    """A command that gives a process a system of its own."""
    command = ["unshare", *options] if os.getuid() == 0 else ["unshare", "--map-root-user", *options]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"needs `{' '.join(command)}`")
    return command


def test_without_proc():
    """As in a chroot. torch itself may compute otherwise there, and we as it does."""
    script = TRAIN.replace("print(", "assert not os.path.exists('/proc/self')\nprint(")
    passes(script, wrap=[*unshared("--mount"), "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"])


READ_ONLY = """
import socket, torch._dynamo  # the first optimizer imports it, for which torch needs a folder for temporary files
try:
    with open(sys.argv[1], "w"):
        raise AssertionError("the file system can be written")
except OSError:
    pass
assert [name for _, name in socket.if_nameindex()] in (["lo"], []), socket.if_nameindex()
before = os.listdir(os.environ["TMPDIR"])
trained().train(2)
roundpipe_go.build_info()
assert os.listdir(os.environ["TMPDIR"]) == before
print("done")
"""


def test_read_only_and_without_network(tmp_path):
    """No file is needed, no address is asked."""
    shell = f'mount -o remount,bind,ro / && mount -t tmpfs none {tmp_path} && exec "$@"'
    wrap = [*unshared("--mount", "--net"), "sh", "-c", shell, "sh"]
    passes(READ_ONLY, "/roundpipe_go_test", wrap=wrap, env={"TMPDIR": str(tmp_path)})


@pytest.mark.parametrize("name", ["jemalloc", "tcmalloc_minimal"])
def test_another_allocator(name):
    """Preloaded for all of the process, as large models do it."""
    folders = [Path(folder) for folder in os.environ.get("ROUNDPIPE_GO_TEST_LIBRARIES", "").split(os.pathsep) if folder]
    library = next((str(file) for folder in folders for file in sorted(folder.glob(f"lib{name}.so*"))), None)
    library = library or ctypes.util.find_library(name)
    if library is None:
        pytest.skip(f"needs lib{name}, from the system's packages or a folder in ROUNDPIPE_GO_TEST_LIBRARIES")
    script = f"assert {name.partition('_')[0]!r} in open('/proc/self/maps').read()\n" + TRAIN
    passes(script, env={"LD_PRELOAD": library})


FAULTHANDLER = """
import ctypes, faulthandler
if sys.argv[1] == "before":
    faulthandler.enable()
trained().train(1)
if sys.argv[1] == "after":
    faulthandler.enable()
trained().train(1)
print("alive", flush=True)
ctypes.string_at(16)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_faulthandler(when):
    """Steps do not disturb it, and somebody else's crash is still reported with Python's stack."""
    outcome = run(FAULTHANDLER, when)
    assert outcome.out == "alive", outcome
    assert outcome.status < 0 or outcome.status == 2, outcome
    assert "string_at" in outcome.err, outcome


CONTROL = """
import ctypes
libm = ctypes.CDLL("libm.so.6")
NEAREST, UP = 0, 0x800
torch.set_num_threads(1)
values = torch.linspace(0.1, 3, 5000)

def step(cls, numel=5000):
    param = values[:numel].clone().requires_grad_()
    optimizer = cls([param], lr=0.3, weight_decay=0.1)
    for _ in range(3):
        param.grad = param.detach() * 0.37
        optimizer.step()
    return param.detach()

# The very first step, which finds out how torch rounds, under another rounding mode, and flushing what is tiny.
kind = sys.argv[1]
if kind == "up":
    assert libm.fesetround(UP) == 0
else:
    assert torch.set_flush_denormal(True)
first = step(roundpipe_go.AdamW)
if kind == "up":
    assert libm.fegetround() == UP, "the mode is the caller's"
    assert libm.fesetround(NEAREST) == 0
else:
    assert torch.tensor(1e-39).mul(1).item() == 0, "the mode is the caller's"
    torch.set_flush_denormal(False)
got, want = step(roundpipe_go.AdamW), step(torch.optim.AdamW)
assert_equal_bits(got, want, "back at the usual mode")
if kind == "up":
    assert not torch.equal(first, want), "the mode had no effect"
    libm.fesetround(UP)
    again = step(roundpipe_go.AdamW)
    libm.fesetround(NEAREST)
    assert_equal_bits(again, first, "under the mode, later")
print("done")
"""


@pytest.mark.parametrize("kind", ["up", "flush"])
def test_changed_floating_point_control(kind):
    """Another rounding mode at the first step: it stays the caller's, and does not spoil what comes after."""
    passes(CONTROL, kind)


GO_LIBRARY = """
package main

import "C"

import (
	"runtime"
	"sync"
)

//export Churn
func Churn(n C.int) C.int {
	var group sync.WaitGroup
	total := make([]int, 8)
	for i := range total {
		group.Add(1)
		go func() {
			defer group.Done()
			for j := range int(n) {
				total[i] += len(make([]byte, j%1000+1))
			}
		}()
	}
	group.Wait()
	runtime.GC()
	sum := 0
	for _, t := range total {
		sum += t
	}
	return C.int(sum % 1000)
}

func main() {}
"""

TWO_RUNTIMES = """
import ctypes
def load():
    return ctypes.CDLL(sys.argv[1]).Churn
churn = load() if sys.argv[2] == "first" else None
want = churn(3000) if churn else None
twins = trained()
churn = churn or load()
want = churn(3000) if want is None else want
failures = []
def other():
    for _ in range(30):
        if churn(3000) != want:
            failures.append("the other library computed something else")
thread = threading.Thread(target=other)
thread.start()
twins.train(6)
thread.join()
assert not failures, failures
print("done")
"""


def test_another_go_library(tmp_path):
    """Two Go runtimes in one process, in either order, at the same time. Go promises nothing here; it has worked."""
    if shutil.which("go") is None:
        pytest.skip("needs go")
    (tmp_path / "main.go").write_text(GO_LIBRARY)
    (tmp_path / "go.mod").write_text("module other\n\ngo 1.22\n")
    library = tmp_path / "other.so"
    built = subprocess.run(
        ["go", "build", "-buildmode=c-shared", "-o", library, "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    for order in ("first", "second"):
        passes(TWO_RUNTIMES, str(library), order)
