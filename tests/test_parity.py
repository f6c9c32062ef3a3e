"""The promise: after every step the bits of torch.optim in the same process, on every backend and number of threads."""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch
from torch import Tensor

import roundpipe_go
from cases import BETAS, DIMENSIONS, ROW_ELEMENTS, SERIAL_BELOW, TENSORS, VARIANTS, Case, allowed, pairwise, product
from oracle import TORCH_CLASS, Twins, assert_equal_bits, randn_like
from roundpipe_go import FallbackWarning

STEPS = 10
COMPARED = (1, 2, STEPS)
"""Steps after which everything is compared; a difference in a moment stays."""

SPECIAL = torch.tensor(
    [0.0, 1.0, 2.0**-149, 2.0**-127, 2.0**-126, 1e-23, 1e-20, 1e-6, 1e6, 1e19, 1.9e19, 1e25, 3.4028235e38, torch.inf, torch.nan]
)
SPECIAL = torch.cat([SPECIAL, -SPECIAL])


def train(case: Case, ours: bool) -> list[dict[str, Tensor]]:
    """Parameters and state after the steps of COMPARED, each kind of tensor as one flat one, in float32."""
    params = TENSORS[case.tensors]()
    options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in case.options.items()}
    optimizer = (case.ours if ours else TORCH_CLASS[case.ours])(params, **options)
    generator = torch.Generator().manual_seed(4)
    history = []
    for step in range(1, STEPS + 1):
        for param in params:
            param.grad = randn_like(param, generator)
        optimizer.step()
        if step in COMPARED:
            columns: dict[str, list[Tensor]] = {"param": params}
            columns |= {key: [optimizer.state[param][key] for param in params] for key in optimizer.state[params[0]]}
            history.append({key: flat(tensors) for key, tensors in columns.items()})
    return history


def flat(tensors: list[Tensor]) -> Tensor:
    tensors = [tensor.detach() for tensor in tensors]
    return torch.cat([(torch.view_as_real(t) if t.is_complex() else t).reshape(-1) for t in tensors])


torchs = functools.lru_cache(maxsize=1)(functools.partial(train, ours=False))
"""torch's side of a case. The backends of a case run one after another, so one is kept."""


def assert_parity(case: Case) -> None:
    roundpipe_go.set_num_threads(case.threads)
    with pytest.warns(FallbackWarning) if case.falls_back else contextlib.nullcontext():
        got = train(case, ours=True)
    want = torchs(case)
    for step, ours, theirs in zip(COMPARED, got, want, strict=True):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_equal_bits(ours[key], theirs[key], f"{case.desc}: step {step}: {key}")


@pytest.mark.parametrize("case", pairwise(), ids=lambda case: case.desc)
def test_bits_of_torch(case, backend):
    assert_parity(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", product(), ids=lambda case: case.desc)
def test_bits_of_torch_in_every_combination(case, backend):
    assert_parity(case)


def test_selection_covers_every_pair_of_choices():
    def pairs(cases):
        return {pair for case in cases for pair in itertools.combinations(vars(case).items(), 2)}

    every = itertools.product(*DIMENSIONS.values())
    assert pairs(pairwise()) == pairs(case for case in (Case(*choices) for choices in every) if allowed(case))


def test_tensors_of_the_threaded_cases_are_enough_for_threads():
    for name in ("lengths", "long", "long_complex"):
        params = TENSORS[name]()
        numel = sum(p.numel() * (2 if p.is_complex() else 1) for p in params)
        assert numel > max(SERIAL_BELOW, ROW_ELEMENTS * len(params)), f"{name}: {numel} elements in {len(params)} tensors"


def variant_ids(variant) -> str:
    return variant[0] if isinstance(variant, tuple) else None


def special_params() -> list[Tensor]:
    """Every special value against every other, 960 elements: whole blocks of torch's vector loop."""
    return [SPECIAL.repeat_interleave(32).requires_grad_()]


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("betas", [betas for name, betas in BETAS.items() if name != "zero"], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_ids)
def test_special_values(variant, betas, eps, backend):
    """Zeros of both signs, denormals, infinities, NaN, huge and tiny values, in parameters and gradients, over steps."""
    _, ours, decay, flags = variant
    twins = Twins(special_params, ours, lr=0.1, betas=betas, eps=eps, **decay, **flags)
    for shift in range(4):
        twins.step([torch.cat([SPECIAL, SPECIAL[:2]]).roll(7 * shift).repeat(30)])


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_ids)
def test_complex_special_values(variant, backend):
    """Weight decay is complex arithmetic in torch: an infinite part times the zero imaginary part of the factor is NaN.

    Served or not, the bits are torch's.
    """
    _, ours, decay, flags = variant
    values = torch.view_as_complex(torch.stack([special_params()[0].detach(), SPECIAL.repeat(32)], dim=1))
    twins = Twins(lambda: [values.clone().requires_grad_()], ours, lr=0.1, **decay, **flags)
    for shift in (7, 14):
        twins.step([values.roll(32 * shift + shift)])


def assert_parity_of_any_bits(variant, numel: int, steps: int) -> None:
    """Random bit patterns in everything a step reads; second moments are never negative."""
    generator = torch.Generator().manual_seed(5)

    def any_float(lowest: int = -(1 << 31)) -> Tensor:
        return torch.randint(lowest, 1 << 31, (numel,), generator=generator).int().view(torch.float32)

    _, ours, decay, flags = variant
    param = any_float()
    twins = Twins(lambda: [param.clone().requires_grad_()], ours, **decay, **flags)
    for _ in range(steps):
        twins.step([any_float()])
        state = {"exp_avg": any_float(), "exp_avg_sq": any_float(lowest=0), "max_exp_avg_sq": any_float(lowest=0)}
        for optimizer in twins:
            for key, tensor in optimizer.state[optimizer.param_groups[0]["params"][0]].items():
                if key != "step":
                    tensor.copy_(state[key])
        twins.step([any_float()])


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_ids)
def test_any_bits(variant, backend):
    assert_parity_of_any_bits(variant, 4099, steps=5)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v[0] in ("l2_amsgrad", "decoupled_maximize")], ids=variant_ids)
def test_any_bits_in_parallel(variant, backend):
    """On helper threads, which must share the caller's mode of rounding and flushing."""
    roundpipe_go.set_num_threads(3)
    assert_parity_of_any_bits(variant, SERIAL_BELOW + 4099, steps=2)


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
@pytest.mark.parametrize("numel", [7, 16, 39])
@pytest.mark.parametrize("betas", [(0.0, 0.9), (1e-40, 1e-40), (1e-320, 0.999)], ids=str)
def test_zeros_where_beta1_is_zero(betas, numel, backend):
    """Weight 1 in lerp: the sign of a zero moment depends on the formula, which torch changes for its last elements.

    Served or not, the bits are torch's.
    """
    twins = Twins(lambda: [torch.ones(numel, requires_grad=True)], roundpipe_go.Adam, betas=betas)
    for grad in (1.0, -0.0, 0.0, -1.0, 0.0, -0.0):
        twins.step([torch.full((numel,), grad)])


@pytest.mark.parametrize("step", [0.5, 1000.25, 2.0**24 - 2, 2.0**24, 1e30], ids=str)
def test_preset_step(step, backend):
    """Counters that are not whole, and the one at which a float32 stops counting."""
    twins = Twins(lambda: [torch.linspace(-1, 1, 100, requires_grad=True)], amsgrad=True)
    twins.train(1)
    for optimizer in twins:
        for state in optimizer.state.values():
            state["step"].fill_(step)
    twins.train(3)
    if step == 2.0**24:
        assert twins.ours.state[twins.params[0]]["step"].item() == 2.0**24


@pytest.mark.parametrize("beta2", [0.0, 0.95, 0.999, 0.9999])
def test_every_bias_correction(beta2, backend):
    """The kernels divide by bias_correction2_sqrt in another way where its bits allow: at most steps, not at all of them."""
    twins = Twins(lambda: [torch.linspace(-1, 1, 1003, requires_grad=True)], betas=(0.9, beta2))
    twins.train(60)


EXTREME_OPTIONS = [
    {"lr": 0.0},
    {"lr": 1e-45},
    {"lr": 1e-320},
    {"lr": 1e37},
    {"lr": float("inf")},
    {"lr": 10**30},
    {"lr": torch.tensor(0.1, dtype=torch.bfloat16)},
    {"lr": torch.tensor(1)},
    {"lr": torch.tensor(float("inf"))},
    {"eps": 1e-46},
    {"eps": 1e39},
    {"eps": float("inf")},
    {"eps": 1},
    {"weight_decay": 1e-46},
    {"weight_decay": 1e-40},
    {"weight_decay": 3e38},
    {"weight_decay": float("inf")},
    {"lr": 1e20, "weight_decay": 1e30},
    {"betas": (1 - 2**-53, 1 - 2**-53)},
    {"betas": (0.5 + 2**-26, 0.5 - 2**-26)},
    {"betas": (0.5 - 2**-54, 1 - 2**-30)},
    {"amsgrad": 1, "maximize": 1},
]


@pytest.mark.parametrize("ours", TORCH_CLASS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("options", EXTREME_OPTIONS, ids=str)
def test_extreme_options(options, ours, backend):
    """Scalars that are denormal, infinite or rounded away in float32, and numbers of other types."""
    twins = Twins(lambda: [torch.linspace(-2, 2, 47, requires_grad=True)], ours, **options)
    twins.train(3)


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
def test_scalar_parameters_under_a_float64_lr(backend):
    """torch multiplies two 0-dim tensors in the wider dtype: the decay of such a parameter is not narrowed to float32 first.

    Served or not, the bits are torch's.
    """
    generator = torch.Generator().manual_seed(8)
    values = torch.randn(200, generator=generator)
    lr = torch.tensor(1e-3, dtype=torch.float64)
    twins = Twins(lambda: [value.clone().requires_grad_() for value in values], lr=lr, weight_decay=0.03)
    twins.train(2)


def test_counters_that_differ_within_a_group(backend):
    """Each distinct count has constants of its own."""
    twins = Twins(lambda: [torch.full((33,), float(i), requires_grad=True) for i in range(5)], roundpipe_go.Adam)
    generator = torch.Generator().manual_seed(6)
    for step in range(5):
        twins.step([torch.randn(33, generator=generator) if i <= step else None for i in range(5)])
    counts = [twins.ours.state[param]["step"].item() for param in twins.params]
    assert counts == [5.0, 4.0, 3.0, 2.0, 1.0]


def test_functional_adam(backend):
    """``roundpipe_go.adam`` is ``torch.optim.adam.adam`` for whoever keeps the state himself."""
    from torch.optim.adam import adam as torch_adam

    def lists():
        generator = torch.Generator().manual_seed(7)
        params, grads, exp_avgs = ([torch.randn(50, generator=generator) for _ in range(4)] for _ in range(3))
        squares = [[torch.rand(50, generator=generator) for _ in range(4)] for _ in range(2)]
        return params, grads, exp_avgs, *squares, [torch.tensor(float(i)) for i in range(4)]

    ours, theirs = lists(), lists()
    options = {"amsgrad": True, "beta1": 0.9, "beta2": 0.99, "lr": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": True}
    assert roundpipe_go.adam(*ours, **options) is None
    with torch.no_grad():
        torch_adam(*theirs, **options)
    for name, got, want in zip(("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps"), ours, theirs):
        for i in range(4):
            assert_equal_bits(got[i], want[i], f"{name}[{i}]")
