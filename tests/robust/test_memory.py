"""Memory: nothing outside of the tensors is touched, what others do to them meanwhile is survived, and nothing piles up."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import roundpipe_go
from oracle import assert_equal_bits, bits

from .processes import passes

PAGE = mmap.PAGESIZE
PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Guarded:
    """Pages between two that cannot be touched; tensors are placed at either end of them.

    Args:
        nbytes: at least so many.
    """

    def __init__(self, nbytes: int) -> None:
        self._inside = -(-nbytes // PAGE) * PAGE
        self._all = self._inside + 2 * PAGE
        self._begin = LIBC.mmap(None, self._all, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert self._begin not in (None, ctypes.c_void_p(-1).value)
        self.protect(PROT_READ | PROT_WRITE)

    def protect(self, protection: int) -> None:
        """Says what may be done to the pages inside."""
        assert LIBC.mprotect(self._begin + PAGE, self._inside, protection) == 0

    def place(self, values: Tensor, from_end: bool) -> Tensor:
        """A copy of the values that begins after the first guard page, or ends before the second."""
        nbytes = values.numel() * values.element_size()
        address = self._begin + PAGE + (self._inside - nbytes if from_end else 0)
        buffer = (ctypes.c_char * nbytes).from_address(address)
        tensor = torch.frombuffer(buffer, dtype=values.dtype).reshape(values.shape)
        tensor.copy_(values)
        assert tensor.data_ptr() == address
        return tensor

    def close(self) -> None:
        LIBC.munmap(self._begin, self._all)


@pytest.fixture
def pages() -> Iterator[list[Guarded]]:
    """For parameter, gradient, moments, maximum and counter."""
    pages = [Guarded(3_000_000) for _ in range(6)]
    yield pages
    for each in pages:
        each.close()


LENGTHS = [*range(1, 70), 127, 128, 129, 1000, 4096, 32_769, 300_001]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_guard_pages_around_every_tensor(dtype, pages, backend):
    """The whole way of a step, short and long, with a gradient that cannot be written."""
    generator = torch.Generator().manual_seed(3)
    roundpipe_go.set_num_threads(2)
    for numel in LENGTHS:
        values = torch.randn(5, numel, dtype=dtype, generator=generator)
        values[3:] = values[3:].abs()
        results = []
        for from_end in (False, True, None):
            placed = [values[0], values[1], values[2], values[3], values[4], torch.tensor([4.0])]
            if from_end is not None:
                placed = [page.place(value, from_end) for page, value in zip(pages, placed)]
            else:
                placed = [value.clone() for value in placed]
            param, grad, *moments, count = placed
            param.requires_grad_()
            param.grad = grad
            optimizer = roundpipe_go.Adam([param], lr=0.1, amsgrad=True)
            names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
            optimizer.state[param] = {"step": count.reshape(()), **dict(zip(names, moments))}
            if from_end is not None:
                pages[1].protect(PROT_READ)
            for _ in range(2):
                optimizer.step()
            pages[1].protect(PROT_READ | PROT_WRITE)
            results.append([tensor.detach().clone() for tensor in placed])
            param.grad = None
        for got in results[:2]:
            for name, g, w in zip(("param", "grad", *names, "step"), got, results[2], strict=True):
                assert_equal_bits(g, w, f"numel={numel}: {name}")
        assert_equal_bits(results[0][1], values[1], f"numel={numel}: grad was written")


MEANWHILE = """
sys.setswitchinterval(1e-5)
numel = int(sys.argv[3])
victims = [torch.nn.Parameter(torch.ones(numel)) for _ in range(8)]
for param in victims:
    param.grad = torch.ones(numel)
optimizer = roundpipe_go.Adam(victims, amsgrad=True)
optimizer.step()
warnings.simplefilter("ignore")
done, kind = threading.Event(), sys.argv[1]

def disturb(seed):
    i = seed
    while not done.is_set():
        i += 1
        param = victims[i % len(victims)]
        state = optimizer.state[param]
        try:
            if kind == "freed":
                state[("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[i % 3]] = torch.zeros(numel)
                param.grad = torch.ones(numel)
            else:
                param.data = torch.ones(numel)
                state["exp_avg"].set_(torch.zeros(numel))
                param.grad.data = torch.ones(numel)
        except RuntimeError:
            pass

threads = [threading.Thread(target=disturb, args=(0,))]  # one: torch's own operations must not race with each other
for thread in threads:
    thread.start()
end, steps, refused = time.monotonic() + float(sys.argv[2]), 0, 0
while time.monotonic() < end:
    try:
        optimizer.step()
        steps += 1
    except (RuntimeError, KeyError, IndexError):  # torch's words for what it finds in between
        refused += 1
done.set()
for thread in threads:
    thread.join()
# Memory that a stray write had hit would show here at the latest.
import gc
gc.collect()
fine = trained(numel=1000)
print(steps, refused, "done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "numel"),  # of each of eight: a step that keeps the GIL, and one that lets it go
    [
        ("freed", 3_000),
        ("freed", 600_000),
        ("repointed", 600_000),
        ("repointed", 3_000),
    ],
)
def test_tensors_changed_meanwhile(kind, numel):
    """Another thread frees or re-points tensors between packing and stepping: never a write to memory that we do not hold."""
    outcome = passes(MEANWHILE, kind, "4", str(numel), env={"MALLOC_PERTURB_": "165", "MALLOC_MMAP_THRESHOLD_": "65536"})
    steps, _, _ = outcome.out.split()
    assert int(steps) > 20, outcome


@pytest.mark.parametrize("lr", [0.001, torch.tensor(0.001)], ids=["plain", "the long way"])
def test_an_overlong_tensor_is_not_believed(lr):
    """A storage shorter than its tensor claims, as after untyped_storage().resize_: torch would write to it."""
    param = torch.ones(100_000, requires_grad=True)
    param.grad = torch.ones(100_000)
    optimizer = roundpipe_go.Adam([param], lr=lr)
    optimizer.step()
    before = param.detach().clone()
    optimizer.state[param]["exp_avg"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert_equal_bits(param, before, "param")
    assert bits(optimizer.state[param]["exp_avg_sq"]).numel() == 100_000


RESIDENT = """
import gc

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
"""

STEPS_IN_A_ROW = (
    RESIDENT
    + """
params = [torch.linspace(-1, 1, n).requires_grad_() for n in (1000, 7, 3)]
odd = torch.linspace(-1, 1, 12).reshape(3, 4).t().requires_grad_()
optimizer, other = roundpipe_go.AdamW(params), roundpipe_go.Adam([odd, torch.ones(3, dtype=torch.float64).requires_grad_()])
for param in (*params, *other.param_groups[0]["params"]):
    param.grad = torch.ones_like(param)
for i in range(100_000):
    optimizer.step()
    if i % 10 == 0:
        other.step()
    if i == 40_000:  # Go's collector has run by then
        started = resident()
grown = resident() - started
assert optimizer.state[params[0]]["step"].item() == 100_000
assert other.state[odd]["step"].item() == 10_000
assert grown < 1 << 20, f"{grown} bytes more"
print("done")
"""
)

OPTIMIZERS_IN_A_ROW = (
    RESIDENT
    + """
def live_once():
    param = torch.ones(5000, requires_grad=True)
    param.grad = torch.ones(5000)
    optimizer = roundpipe_go.AdamW([param], amsgrad=True)
    for _ in range(3):
        optimizer.step()

threads = threading.active_count()
gc.disable()
for i in range(14_000):
    live_once()
    if i == 4000:  # Go's collector has run by then
        started = resident()
grown = resident() - started
assert grown < 1 << 20, f"{grown} bytes more"
assert threading.active_count() == threads
print("done")
"""
)


@pytest.mark.slow
def test_memory_after_100_000_steps_is_that_after_40_000():
    """Plain ones, and every tenth by the long way."""
    passes(STEPS_IN_A_ROW)


@pytest.mark.slow
def test_memory_after_14_000_optimizers_is_that_after_4_000():
    """Made, stepped by both ways, dropped; without the garbage collector's help."""
    passes(OPTIMIZERS_IN_A_ROW)


CHANGES = """
import gc
from roundpipe_go import _binding
warnings.simplefilter("ignore")
NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")

def state_replaced(param, state):
    for name in NAMES:
        state[name] = torch.zeros_like(state[name])
def state_cleared(param, state):
    state.clear()
def state_set(param, state):
    for name in NAMES:
        state[name].set_(torch.zeros_like(state[name]))
def state_data(param, state):
    for name in NAMES:
        state[name].data = torch.zeros_like(state[name])
def param_data(param, state):
    param.data = torch.zeros_like(param)
def grad_none(param, state):
    param.grad = None
def grad_data(param, state):
    param.grad.data = torch.zeros_like(param.grad)
ALL = (state_replaced, state_cleared, state_set, state_data, param_data, grad_none, grad_data)

def optimizer_of(numel):
    param = torch.nn.Parameter(torch.ones(numel))
    param.grad = torch.ones(numel)
    optimizer = roundpipe_go.Adam([param], amsgrad=True)
    optimizer.step()
    return optimizer, param

def junk_of(numel):
    # Of the sizes that were let go: an allocator hands the same memory out again.
    gc.collect()
    return [torch.full((numel,), 7.0) for _ in range(12)] + [torch.full((), 7.0) for _ in range(12)]

def check(junk, change):
    wrong = [i for i, tensor in enumerate(junk) if not torch.all(tensor == 7)]
    assert not wrong, f"{change.__name__}: memory that was handed out again has been written: {wrong}"
"""

BETWEEN = (
    CHANGES
    + """
_binding.plain_step = lambda: None  # the long way, whose native call is a function of Python's
native = _binding.step
for change in ALL:
    optimizer, param = optimizer_of(70_000)
    junk = []
    def between(*arguments):
        change(param, optimizer.state[param])
        junk.extend(junk_of(70_000))
        return native(*arguments)
    _binding.step = between
    optimizer.step()
    _binding.step = native
    assert junk, "the native call was not seen"
    check(junk, change)
print("done")
"""
)

DURING = (
    CHANGES
    + """
numel = 3_000_000
roundpipe_go.set_backend("generic")
roundpipe_go.set_num_threads(1)
for change in ALL:
    optimizer, param = optimizer_of(numel)
    state, junk, entered, changed = optimizer.state[param], [], threading.Event(), []
    def disturb():
        entered.wait()
        time.sleep(0.005)  # the step is in Go by now, and takes ten times as long
        change(param, state)
        changed.append(time.monotonic())
        junk.extend(junk_of(numel))
    thread = threading.Thread(target=disturb)
    thread.start()
    entered.set()
    optimizer.step()
    ended = time.monotonic()
    thread.join()
    assert changed[0] < ended, "the GIL was not let go"
    check(junk, change)
print("done")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("script", [BETWEEN, DURING], ids=["between", "during"])
def test_tensors_changed_between_packing_and_stepping(script):
    """In the very moment: memory that was let go and handed out again stays as it is."""
    passes(script, env={"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "1000000000"})
