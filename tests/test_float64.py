"""float64 and complex128 parameters: torch's bits, as in float32, and both precisions in one step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import roundpipe_go
from cases import BETAS, SERIAL_BELOW, VARIANTS
from native import native_steps
from oracle import Twins, assert_equal_bits, ieee_sqrt, randn_like
from roundpipe_go import FallbackWarning, _torch_arithmetic
from roundpipe_go._fallback import DECOUPLED_IN_ADAM
from roundpipe_go._torch_arithmetic import torch_arithmetic

SERVED_BETAS = {name: betas for name, betas in BETAS.items() if name != "zero"}
FEW = [variant for variant in VARIANTS if variant[0] in ("l2_amsgrad", "decoupled_maximize")]
UNDECAYED = [variant for variant in VARIANTS if variant[0].startswith("none")]

SPECIAL = torch.tensor(
    [0.0, 1.0, 2.0**-1074, 2.0**-1022, 1e-162, 1e-154, 1e-6, 1e6, 1e154, 1.4e154, 1e200, 1.7e308, torch.inf, torch.nan],
    dtype=torch.float64,
)
SPECIAL = torch.cat([SPECIAL, -SPECIAL])


def variants(some):
    return pytest.mark.parametrize("variant", some, ids=lambda variant: variant[0])


def random(shape, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def parameters(*values: Tensor):
    """Makes equal parameters at each call."""
    return lambda: [value.clone().requires_grad_() for value in values]


@pytest.fixture
def native_calls() -> Iterator[list[torch.dtype]]:
    """The dtypes of the native steps so far."""
    with native_steps() as dtypes:
        yield dtypes


@variants(FEW)
def test_lengths(variant, backend):
    """Every length around the vector widths."""
    _, ours, decay, flags = variant
    Twins(parameters(*(random(n, n) for n in range(301))), ours, **decay, **flags).train(2)


@pytest.mark.parametrize("betas", SERVED_BETAS.values(), ids=SERVED_BETAS)
@variants(VARIANTS)
def test_options(variant, betas, backend):
    _, ours, decay, flags = variant
    Twins(parameters(random(1009)), ours, betas=betas, **decay, **flags).train(10)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@variants(FEW)
def test_threads(variant, threads, backend):
    _, ours, decay, flags = variant
    roundpipe_go.set_num_threads(threads)
    Twins(parameters(*map(random, (SERIAL_BELOW + 77, 3, 40_001, ()))), ours, **decay, **flags).train(3)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("betas", SERVED_BETAS.values(), ids=str)
@variants(VARIANTS)
def test_special_values(variant, betas, eps, backend):
    """Zeros of both signs, denormals, infinities, NaN, huge and tiny values, in parameters and gradients, over steps."""
    _, ours, decay, flags = variant
    twins = Twins(parameters(SPECIAL.repeat_interleave(len(SPECIAL) + 2)), ours, lr=0.1, betas=betas, eps=eps, **decay, **flags)
    for shift in range(4):
        twins.step([torch.cat([SPECIAL, SPECIAL[:2]]).roll(7 * shift).repeat(len(SPECIAL))])


@variants(VARIANTS)
def test_any_bits(variant, backend):
    """Random bit patterns in everything a step reads; second moments are never negative."""
    generator = torch.Generator().manual_seed(5)

    def any_float(lowest: int = -(1 << 63)) -> Tensor:
        return torch.randint(lowest, (1 << 63) - 1, (4099,), generator=generator).view(torch.float64)

    _, ours, decay, flags = variant
    twins = Twins(parameters(any_float()), ours, **decay, **flags)
    for _ in range(5):
        twins.step([any_float()])
        state = {"exp_avg": any_float(), "exp_avg_sq": any_float(lowest=0), "max_exp_avg_sq": any_float(lowest=0)}
        for optimizer in twins:
            for key, tensor in optimizer.state[optimizer.param_groups[0]["params"][0]].items():
                if key != "step":
                    tensor.copy_(state[key])
        twins.step([any_float()])


@pytest.mark.parametrize("shape", [(0,), (), (1,), (7, 5), (SERIAL_BELOW // 2 + 33,)], ids=str)
@variants(UNDECAYED)
def test_complex128(variant, shape, backend):
    _, ours, decay, flags = variant
    Twins(parameters(random(shape, dtype=torch.complex128)), ours, lr=0.05, **decay, **flags).train(3)


@pytest.mark.parametrize(
    "weight_decay",
    [{"weight_decay": 0.1}, *([{"weight_decay": 0.1, "decoupled_weight_decay": True}] if DECOUPLED_IN_ADAM else [])],
    ids=str,
)
def test_complex128_decay_is_torchs(weight_decay):
    twins = Twins(parameters(random((7, 5), dtype=torch.complex128)), roundpipe_go.Adam, **weight_decay)
    with pytest.warns(FallbackWarning, match="a complex parameter has weight decay"):
        twins.train(3)


LRS = [torch.tensor(1e-3, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
LRS += [torch.tensor(1)]
if DECOUPLED_IN_ADAM:  # torch 2.6 raises
    LRS += [torch.tensor([1e-3]), torch.tensor([1e-3], dtype=torch.float64)]


@pytest.mark.parametrize("ours", [roundpipe_go.Adam, roundpipe_go.AdamW], ids=lambda ours: ours.__name__)
@pytest.mark.parametrize("lr", LRS, ids=str)
def test_tensor_lr(lr, ours, backend):
    """Parameters without dimensions too: nothing is narrowed on the way to them."""
    Twins(parameters(random(47), *random(20, 2)), ours, lr=lr, weight_decay=0.03).train(3)


EXTREME_OPTIONS = [
    {"lr": 0.0},
    {"lr": 5e-324},
    {"lr": 1e39},
    {"lr": 1e300},
    {"lr": float("inf")},
    {"eps": 1e-320},
    {"eps": float("inf")},
    {"weight_decay": 1e-310},
    {"weight_decay": 1e39},
    {"weight_decay": float("inf")},
    {"lr": 1e200, "weight_decay": 1e200},
    {"betas": (1 - 2**-53, 1 - 2**-53)},
    {"betas": (0.5 + 2**-53, 0.5 - 2**-54)},
    {"betas": (0.5 - 2**-54, 1 - 2**-30)},
]


@pytest.mark.parametrize("ours", [roundpipe_go.Adam, roundpipe_go.AdamW], ids=lambda ours: ours.__name__)
@pytest.mark.parametrize("options", EXTREME_OPTIONS, ids=str)
def test_extreme_options(options, ours, backend):
    """What does not fit into a float32 is as good as any other number."""
    Twins(parameters(torch.linspace(-2, 2, 47, dtype=torch.float64)), ours, **options).train(3)


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
@pytest.mark.parametrize("beta1", [0.0, 1e-320, 2**-54, 2**-53, 2**-26, 2**-24], ids=str)
def test_beta1_near_zero(beta1, backend):
    """Served or not, the bits are torch's."""
    twins = Twins(parameters(torch.ones(39, dtype=torch.float64)), betas=(beta1, 0.9))
    for grad in (1.0, -0.0, 0.0, -1.0, 0.0, -0.0):
        twins.step([torch.full((39,), grad, dtype=torch.float64)])


def test_default_dtype(backend):
    """Counters are float64 then, and go on beyond 2**24."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        twins = Twins(lambda: [torch.linspace(-1, 1, 33, requires_grad=True)], amsgrad=True)
        twins.train(2)
        step = twins.ours.state[twins.params[0]]["step"]
        assert step.dtype == torch.float64
        for optimizer in twins:
            for state in optimizer.state.values():
                state["step"].fill_(2.0**24)
        twins.train(2, seed=1)
    finally:
        torch.set_default_dtype(before)
    assert step.item() == 2.0**24 + 2


@pytest.mark.parametrize("step", [0.5, 1000.25, 2.0**24 - 2, 1e30], ids=str)
def test_preset_step(step, backend):
    twins = Twins(parameters(random(100)), amsgrad=True)
    twins.train(1)
    for optimizer in twins:
        for state in optimizer.state.values():
            state["step"].fill_(step)
    twins.train(3)


def test_layouts(backend):
    Twins(lambda: [random((7, 5)).t().requires_grad_(), random((3, 4, 5, 6)).permute(0, 3, 1, 2).requires_grad_()]).train(3)


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
def test_elements_that_are_not_aligned():
    """Half of an element off, as in a file that is mapped. Served or not, the bits are torch's."""
    Twins(lambda: [torch.frombuffer(bytearray(8 * 50 + 4), dtype=torch.float64, offset=4).requires_grad_()]).train(2)


# ---- both precisions in one optimizer


DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def motley() -> list[Tensor]:
    shapes = [(n,) for n in (0, 1, 5, 16, 33, 1023)] + [(), (3, 5, 7)]
    return [random(shape, dtype=dtype).requires_grad_() for shape in shapes for dtype in DTYPES]


@pytest.mark.parametrize("amsgrad", [False, True])
def test_mixed_group(amsgrad, backend, native_calls):
    """One native call for each precision."""
    Twins(motley, roundpipe_go.Adam, amsgrad=amsgrad).train(3)
    assert native_calls == 3 * [torch.float32, torch.float64]


def test_mixed_groups(backend, native_calls):
    def make():
        return [
            {"params": parameters(random(70, 1, torch.float32), random(50, 2))(), "lr": 0.1},
            {"params": parameters(random(SERIAL_BELOW + 5, 3))(), "amsgrad": True, "weight_decay": 0},
            {"params": parameters(random(SERIAL_BELOW + 9, 4, torch.float32), random((), 5))(), "betas": (0.3, 0.9)},
        ]

    roundpipe_go.set_num_threads(3)
    Twins(make).train(3)
    assert native_calls == 3 * [torch.float32, torch.float64]


def test_mixed_with_torchs(backend):
    twins = Twins(lambda: [random(40, dtype=dtype).requires_grad_() for dtype in (*DTYPES, torch.bfloat16)], roundpipe_go.Adam)
    with pytest.warns(FallbackWarning, match="not float32") as caught:
        twins.train(3)
    assert len(caught) == 1


def test_one_storage_for_both_precisions():
    """Neither may go before the other, except as torch has it."""

    def make():
        buffer = torch.linspace(-1, 1, 40, dtype=torch.float64)
        return [buffer[:30].requires_grad_(), buffer[20:].view(torch.float32).detach().requires_grad_()]

    twins = Twins(make)
    with pytest.warns(FallbackWarning, match="share memory"):
        twins.train(3)


def test_one_counter_for_both_precisions():
    twins = Twins(parameters(random(9), random(9, dtype=torch.float32)))
    twins.train(1)
    for optimizer in twins:
        first, second = optimizer.state.values()
        second["step"] = first["step"]
    with pytest.warns(FallbackWarning, match="share memory"):
        twins.train(1)


def test_refusal_of_one_precision_leaves_the_other():
    """The float64 row's tensors share memory, which Go finds out when the float32 row is done."""
    twins = Twins(parameters(random(9, dtype=torch.float32), random(9)))
    twins.train(1)
    for optimizer in twins:
        state = optimizer.state[optimizer.param_groups[0]["params"][1]]
        state["exp_avg"] = state["exp_avg_sq"]
    with pytest.warns(FallbackWarning, match="share memory"):
        twins.train(2)


def test_state_goes_over_to_torch_and_back(backend):
    twins = Twins(motley, roundpipe_go.Adam, amsgrad=True)
    twins.train(2)
    ours, theirs = (optimizer.state_dict() for optimizer in twins)
    twins.ours.load_state_dict(theirs)
    twins.torch.load_state_dict(ours)
    twins.train(2, seed=1)


# ---- the square root


@pytest.fixture
def forgotten():
    """The test finds out anew, and leaves nothing that it found out under a false torch."""
    _torch_arithmetic._detect.cache_clear()
    yield
    _torch_arithmetic._detect.cache_clear()


def wrong_at(value: float, sqrt):
    """A square root that is one ulp off for one double, and right for float32."""

    def false_sqrt(x: Tensor, out: Tensor | None = None) -> Tensor:
        y = sqrt(x, out=out)
        if x.dtype is not torch.float64:
            return y
        return torch.where(x == value, (y.view(torch.int64) + 1).view(torch.float64), y, out=out)

    return false_sqrt


def test_choice_is_the_first_that_equals_torch():
    """On values that the probe has not seen."""
    arithmetic = torch_arithmetic(torch.float64)
    assert arithmetic.arithmetic == torch_arithmetic(torch.float32).arithmetic
    assert arithmetic.square_root in ("ieee", "library"), "no square root of the kernels is torch's"
    patterns = torch.randint(0, (1 << 63) - 1, (1 << 20,), generator=torch.Generator().manual_seed(1))
    assert _torch_arithmetic._sqrt_equals(patterns.view(torch.float64), arithmetic.square_root)
    info = roundpipe_go.build_info()
    assert (info["square_root_float64"], info["why_float64"]) == (arithmetic.square_root, arithmetic.why)


def test_probe_has_every_binade_and_the_edges():
    probe = torch.cat(list(_torch_arithmetic._probe(torch.float64)))
    assert len(probe) > 500_000
    exponents = probe.view(torch.int64) >> 52 & 0x7FF
    assert torch.bincount(exponents, minlength=2048).min() >= 256
    edges = [0.0, -0.0, 2.0**-1074, 2.0**-1022, 1.0, 1.0 + 2**-52, 1.7976931348623157e308, math.inf, -math.inf, -1.0]
    have = set(probe.view(torch.int64).tolist())
    assert have >= set(torch.tensor(edges, dtype=torch.float64).view(torch.int64).tolist())
    assert probe.isnan().any()


def test_hardest_roots_are_next_to_a_middle():
    """In integers: the root of x is within 2**-44 halves of the last place from the middle between two doubles."""
    hardest = _torch_arithmetic._hardest()
    assert len(hardest) > 300
    assert min(hardest) < 2 <= max(hardest)
    for x in hardest:
        significand = int(x * 2**52)
        assert significand * 2**-52 == x
        root = math.isqrt(significand << 152)  # in units of 2**-102; the last place of a double is 2**50 of them
        offset = (root - 2**49) % 2**50
        assert min(offset, 2**50 - offset) <= 2**5, x.hex()


def test_correctly_rounded_torch_gets_ieee(monkeypatch, forgotten):
    monkeypatch.setattr(torch, "sqrt", ieee_sqrt)
    assert torch_arithmetic(torch.float64).square_root == "ieee"


def test_one_wrong_value_refuses_ieee(monkeypatch, forgotten):
    """One of those that are hardest to round."""
    monkeypatch.setattr(torch, "sqrt", wrong_at(_torch_arithmetic._hardest()[100], ieee_sqrt))
    assert torch_arithmetic(torch.float64).square_root is None


@pytest.mark.parametrize("value", [0.0, 1.0, 2.0**-1074, 2.0**-1022, 1.7976931348623157e308, math.inf], ids=str)
@pytest.mark.parametrize("sqrt", [torch.sqrt, ieee_sqrt], ids=["torch", "ieee"])
def test_wrong_edges_refuse_all(monkeypatch, forgotten, sqrt, value):
    monkeypatch.setattr(torch, "sqrt", wrong_at(value, sqrt))
    assert torch_arithmetic(torch.float64).square_root is None


def test_without_a_square_root_torch_computes_float64_alone(monkeypatch, forgotten, native_calls):
    monkeypatch.setattr(torch, "sqrt", wrong_at(1.0, torch.sqrt))
    _torch_arithmetic._detect.cache_clear()
    assert torch_arithmetic(torch.float32).square_root is not None
    native_calls.clear()
    twins = Twins(motley, roundpipe_go.Adam)
    with pytest.warns(FallbackWarning, match="no square root of the kernels equals torch.sqrt") as caught:
        twins.train(3)
    assert len(caught) == 1
    assert native_calls == 3 * [torch.float32]


@pytest.mark.parametrize("flags", [{}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_ieee_is_torchs_formula_with_the_correct_root(dtype, flags, backend, monkeypatch, forgotten):
    roundpipe_go.set_square_root("ieee")
    twins = Twins(parameters(random(5000, dtype=dtype)), roundpipe_go.Adam, **flags)
    monkeypatch.setattr(torch.Tensor, "sqrt", ieee_sqrt)
    twins.train(3)


def test_bits_do_not_depend_on_the_backend():
    """Nor on what torch has for a square root."""
    results = []
    for backend, root in itertools.product(roundpipe_go.available_backends(), ("auto", "ieee")):
        roundpipe_go.set_backend(backend)
        roundpipe_go.set_square_root(root)
        param = random(5003).requires_grad_()
        optimizer = roundpipe_go.AdamW([param], amsgrad=True)
        generator = torch.Generator().manual_seed(6)
        for _ in range(5):
            param.grad = randn_like(param, generator)
            optimizer.step()
        results.append((root, param))
    for root, param in results[2:]:
        assert_equal_bits(param, dict(results[:2])[root], f"square root {root}")
