"""Refusals: torch's type and sentence where torch refuses, one of ours elsewhere, and nothing changed by either."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
import sympy
import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.testing._internal.common_optimizers import optim_db

import roundpipe_go
from oracle import TORCH_CLASS, Twins, assert_equal_bits, assert_unchanged, snapshot

CLASSES = pytest.mark.parametrize("ours", TORCH_CLASS, ids=lambda cls: cls.__name__)


def make_params() -> list[Tensor]:
    return [torch.linspace(-1, 1, 6).requires_grad_(), torch.full((2, 3), 0.5, requires_grad=True)]


def outcome(constructor: type, params: Any, options: dict[str, Any]) -> tuple[type, str] | None:
    """Type and text of what a constructor raises, warnings included."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            constructor(params, **options)
        except Exception as error:
            return type(error), str(error)
    return None


def torchs_error_inputs():
    for info in optim_db:
        if info.optim_cls in TORCH_CLASS.values():
            for error_input in info.optim_error_inputs_func("cpu", torch.float32):
                ours = next(ours for ours, theirs in TORCH_CLASS.items() if theirs is info.optim_cls)
                desc = error_input.optimizer_error_input.desc
                yield pytest.param(ours, error_input, id=f"{ours.__name__}-{desc}")


@pytest.mark.parametrize(("ours", "error_input"), list(torchs_error_inputs()))
def test_torchs_own_error_inputs(ours, error_input):
    """The list that torch's own tests use."""
    case = error_input.optimizer_error_input
    params = make_params() if case.params is None else case.params
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error_input.error_type, match=error_input.error_regex):
            ours(params, **case.kwargs)
    assert outcome(ours, params, case.kwargs) == outcome(TORCH_CLASS[ours], params, case.kwargs)


BAD_OPTIONS = [
    {"lr": -1.0},
    {"lr": float("nan")},
    {"lr": "0.1"},
    {"lr": None},
    {"lr": torch.tensor([0.1, 0.2])},
    {"lr": torch.tensor(-0.1)},
    {"eps": -1e-8},
    {"eps": float("nan")},
    {"betas": (1.0, 0.9)},
    {"betas": (0.9, 1.0)},
    {"betas": (-0.1, 0.9)},
    {"betas": (float("nan"), 0.9)},
    {"betas": (0, 0.9)},
    {"betas": (0.9,)},
    {"betas": 0.9},
    {"betas": (torch.tensor(0.9), torch.tensor([0.9, 0.9]))},
    {"weight_decay": -0.1},
    {"weight_decay": float("nan")},
    {"fused": True, "differentiable": True},
    {"fused": True, "foreach": True},
    {"learning_rate": 0.1},
]


@CLASSES
@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_constructor_refuses_as_torch(ours, options):
    got, want = outcome(ours, make_params(), options), outcome(TORCH_CLASS[ours], make_params(), options)
    assert want is not None, "torch accepts it"
    assert got == want


BAD_PARAMS = {
    "empty": list,
    "a_tensor": lambda: torch.ones(2, requires_grad=True),
    "numbers": lambda: [1.0, 2.0],
    "not_a_leaf": lambda: [torch.ones(2, requires_grad=True) * 2],
    "half_named": lambda: [("a", torch.ones(1, requires_grad=True)), torch.ones(1, requires_grad=True)],
    "group_without_params": lambda: [{"lr": 0.1}],
    "group_with_a_bad_option": lambda: [{"params": make_params(), "lr": None}],
}


@CLASSES
@pytest.mark.parametrize("params", BAD_PARAMS)
def test_params_are_refused_as_by_torch(ours, params):
    assert outcome(ours, BAD_PARAMS[params](), {}) == outcome(TORCH_CLASS[ours], BAD_PARAMS[params](), {})


@CLASSES
def test_the_group_added_later_is_checked(ours):
    twins = Twins(make_params, ours)
    twins.train(1)
    error = twins.assert_equal_errors(lambda o: o.add_param_group({"params": o.param_groups[0]["params"][:1]}))
    assert "more than one parameter group" in str(error)
    twins.train(1)


@dataclass(frozen=True)
class BadStep:
    """What makes a step fail in the middle of training.

    Attributes:
        desc: the test's id.
        spoil: done to each optimizer after two good steps.
    """

    desc: str
    spoil: Callable[[torch.optim.Optimizer], None]


def last(optimizer: torch.optim.Optimizer) -> Tensor:
    """The last parameter: whatever comes before it must not have been written."""
    return optimizer.param_groups[-1]["params"][-1]


def cloned(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}


def set_group(**options: Any) -> Callable[[torch.optim.Optimizer], None]:
    return lambda optimizer: optimizer.param_groups[-1].update(cloned(options))


def set_state(**state: Any) -> Callable[[torch.optim.Optimizer], None]:
    return lambda optimizer: optimizer.state[last(optimizer)].update(cloned(state))


def sparse_grad(optimizer: torch.optim.Optimizer) -> None:
    last(optimizer).grad = torch.eye(2, 3).to_sparse()


def float64_grad(optimizer: torch.optim.Optimizer) -> None:
    param = last(optimizer)
    param.grad = None
    param.grad_dtype = None
    param.grad = torch.ones(2, 3, dtype=torch.float64)


def meta_param(optimizer: torch.optim.Optimizer) -> None:
    param = last(optimizer)
    grad = param.grad
    optimizer.state[torch.nn.Parameter(torch.ones(2, 3, device="meta"))] = optimizer.state.pop(param)
    optimizer.param_groups[-1]["params"][-1] = list(optimizer.state)[-1]
    last(optimizer).grad = grad.to("meta")


def conjugate_grad(optimizer: torch.optim.Optimizer) -> None:
    param = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    param.grad = torch.full((3,), 1j).conj()
    optimizer.param_groups[-1]["params"][-1] = param


def shape_of_param(optimizer: torch.optim.Optimizer) -> None:
    last(optimizer).data = torch.ones(5, 3)


def l2_decay_too_large(optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[-1]
    group["weight_decay"] = 1e39
    if "decoupled_weight_decay" in group:
        group["decoupled_weight_decay"] = False
    else:  # torch 2.6, where the decay of AdamW cannot be switched: another option that does not fit
        group["lr"] = 1e39


BAD_STEPS = [
    BadStep("sparse_grad", sparse_grad),
    *([BadStep("float64_grad", float64_grad)] if hasattr(Tensor, "grad_dtype") else []),  # elsewhere it cannot be assigned
    BadStep("meta_param_with_state_on_the_cpu", meta_param),
    BadStep("conjugate_grad", conjugate_grad),
    BadStep("param_of_another_shape", shape_of_param),
    BadStep("moment_of_another_shape", set_state(exp_avg=torch.zeros(5))),
    BadStep("moment_of_another_dtype", set_state(exp_avg=torch.zeros(2, 3, dtype=torch.float64))),
    BadStep("moment_missing", lambda optimizer: optimizer.state[last(optimizer)].pop("exp_avg")),
    BadStep("amsgrad_later", set_group(amsgrad=True)),
    BadStep("option_missing", lambda optimizer: optimizer.param_groups[-1].pop("eps")),
    BadStep("three_betas", set_group(betas=(0.9, 0.99, 0.999))),
    BadStep("betas_none", set_group(betas=(None, 0.99))),
    BadStep("lr_string", set_group(lr="0.1")),
    BadStep("lr_of_two", set_group(lr=torch.tensor([0.1, 0.2]))),
    BadStep("lr_tensor_with_foreach", set_group(lr=torch.tensor(0.1), foreach=True)),
    BadStep("lr_too_large", set_group(lr=1e39)),
    BadStep("weight_decay_too_large", l2_decay_too_large),
    BadStep("bias_correction_zero", set_state(step=torch.tensor(-1.0))),
    BadStep("bias_correction_complex", set_state(step=torch.tensor(-3.0))),
    BadStep("bias_correction_overflows", set_state(step=torch.tensor(-1e6))),
    BadStep("step_of_two", set_state(step=torch.ones(2))),
    BadStep("step_a_float", set_state(step=2.0)),
]


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")  # where torch itself is asked for its error
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("case", BAD_STEPS, ids=lambda case: case.desc)
def test_step_fails_as_torch_and_changes_nothing(case, groups):
    def make():
        a, b = make_params()
        return [a, b] if groups == 1 else [{"params": [a]}, {"params": [b]}]

    twins = Twins(make)
    twins.train(2)
    for optimizer in twins:
        case.spoil(optimizer)
    twins.assert_equal_errors(lambda optimizer: optimizer.step())


@CLASSES
def test_training_goes_on_after_a_refused_step(ours):
    twins = Twins(make_params, ours)
    twins.train(1)
    twins.set_grads([torch.ones(6), torch.eye(2, 3).to_sparse()])
    with pytest.raises(RuntimeError, match="sparse"):
        twins.ours.step()
    twins.train(2)


def test_functional_refuses_counters_that_are_numbers():
    lists = [[torch.ones(3), torch.ones(2)] for _ in range(5)] + [[1, 2]]
    before = [[t.clone() for t in tensors] for tensors in lists[:5]]
    with pytest.raises(RuntimeError, match="state_steps"):
        roundpipe_go.adam(*lists, amsgrad=False, beta1=0.9, beta2=0.9, lr=0.1, weight_decay=0, eps=0, maximize=False)
    assert all(torch.equal(t, b) for ts, bs in zip(lists, before) for t, b in zip(ts, bs))


def test_closure_that_raises_changes_nothing():
    twins = Twins(make_params)
    twins.train(1)

    def closure():
        raise KeyError("loss")

    assert "loss" in str(twins.assert_equal_errors(lambda optimizer: optimizer.step(closure)))
    twins.train(1)


@pytest.mark.parametrize("value", ["abc", "0", "9" * 30])
def test_useless_setting_changes_nothing(switch, value):
    """Also where torch computes a part of the step, which would come first."""
    params = [torch.ones(3, dtype=torch.bfloat16, requires_grad=True), torch.ones(3, requires_grad=True)]
    optimizer = roundpipe_go.AdamW(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", roundpipe_go.FallbackWarning)
        optimizer.step()
        before = snapshot(optimizer)
        switch("NUM_THREADS", value)
        with pytest.raises(ValueError, match="ROUNDPIPE_GO_NUM_THREADS"):
            optimizer.step()
    assert_unchanged(before)


@pytest.mark.parametrize("spoil", [{"capturable": True}, {"lr": "x"}], ids=str)
def test_failing_group_puts_back_those_before_it(spoil):
    """A group in torch's hands beside one whose call raises: gradients of other strides, then what torch refuses."""
    params = [torch.ones(4, 3, requires_grad=True), torch.ones(5, requires_grad=True), torch.ones(6, requires_grad=True)]
    optimizer = roundpipe_go.AdamW([{"params": [param]} for param in params], lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    params[0].grad = torch.ones(3, 4).t()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", roundpipe_go.FallbackWarning)
        optimizer.step()
        before = snapshot(optimizer)
        optimizer.param_groups[2].update(spoil)
        with pytest.raises((AssertionError, TypeError)):
            optimizer.step()
    assert_unchanged(before)


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_fused_has_counted_when_it_finds_no_kernel(lr):
    """For complex parameters; torch's own counters are then a step ahead."""
    param = torch.ones(3, dtype=torch.complex64).requires_grad_()
    param.grad = torch.ones(3, dtype=torch.complex64)
    optimizer = roundpipe_go.Adam([param], lr=lr)
    optimizer.step()
    before = snapshot(optimizer)
    optimizer.param_groups[0]["fused"] = True
    with pytest.raises(RuntimeError, match="fused_adam"):
        optimizer.step()
    assert_unchanged(before)


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
def test_conjugate_gradient_is_refused_after_counting():
    """By torch; beta1 of 0 is why it computes here at all."""
    param = torch.ones(3, dtype=torch.complex64).requires_grad_()
    param.grad = torch.ones(3, dtype=torch.complex64)
    optimizer = roundpipe_go.Adam([param], betas=(0.0, 0.9))
    optimizer.step()
    before = snapshot(optimizer)
    param.grad = torch.ones(3, dtype=torch.complex64).conj()
    with pytest.raises(RuntimeError, match="view_as_real"):
        optimizer.step()
    assert_unchanged(before)


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_of_two_errors_torchs_is_the_first(foreach, groups):
    """A parameter of another dtype than its state, and a conjugate gradient; between them one that is served."""
    sentences = []
    for cls in (roundpipe_go.Adam, torch.optim.Adam):
        params = [torch.ones(3), torch.ones(4), torch.ones(5, dtype=torch.complex64)]
        for param in params:
            param.requires_grad_().grad = torch.ones_like(param)
        optimizer = cls([{"params": params[:2]}, {"params": params[2:]}] if groups == 2 else params, foreach=foreach)
        optimizer.step()
        params[0].grad = None
        params[0].data = params[0].data.double()
        params[0].grad, params[2].grad = torch.ones(3, dtype=torch.float64), params[2].grad.conj()
        before = snapshot(optimizer)
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        sentences.append(str(raised.value))
        if cls is roundpipe_go.Adam:
            assert_unchanged(before)
    assert sentences[0] == sentences[1]


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
def test_an_error_of_the_first_group_comes_before_one_of_the_second():
    """The second's is found while the tensors are collected, which torch does group by group."""
    sentences = []
    for cls in (roundpipe_go.Adam, torch.optim.Adam):
        params = [torch.ones(3, requires_grad=True), torch.ones(4, requires_grad=True)]
        optimizer = cls([{"params": [param]} for param in params])
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        params[0].grad = None
        params[0].data = params[0].data.double()
        params[0].grad = torch.ones(3, dtype=torch.float64)
        optimizer.param_groups[1]["amsgrad"] = True  # there is no maximum
        before = snapshot(optimizer)
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        sentences.append(str(raised.value))
        if cls is roundpipe_go.Adam:
            assert_unchanged(before)
            optimizer.param_groups[0]["params"] = []
            with pytest.raises(KeyError, match="max_exp_avg_sq"):
                optimizer.step()
    assert sentences[0] == sentences[1]


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
def test_a_refused_group_beside_one_that_shares_memory_with_it():
    """Then torch computes both, in order; what it did to the first is put back."""
    params = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)]
    optimizer = roundpipe_go.Adam([{"params": [param]} for param in params])
    params[0].grad = params[1].grad = torch.ones(3)
    optimizer.step()
    before = snapshot(optimizer)
    optimizer.param_groups[1]["capturable"] = True
    with pytest.raises(AssertionError, match="capturable"):
        optimizer.step()
    assert_unchanged(before)


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize(
    "moment", [None, 3, 2.0, [1.0], "moment", numpy.ones(6, dtype=numpy.float32)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("name", ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
def test_state_that_is_no_tensor(name, moment, foreach):
    """torch has counted, and updated the first parameter, when it comes to it."""
    errors = []
    for cls in (roundpipe_go.Adam, torch.optim.Adam):
        params = make_params()
        optimizer = cls([{"params": [param]} for param in params], amsgrad=True, foreach=foreach)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        before = snapshot(optimizer)
        optimizer.state[params[1]][name] = moment
        with pytest.raises((TypeError, AttributeError, RuntimeError)) as caught:
            optimizer.step()
        errors.append(f"{caught.type.__name__}: {caught.value}")
        if cls is roundpipe_go.Adam:
            assert_unchanged(before)
    assert errors[0] == errors[1]


NUMBERS = (
    *(True, 0, -1, 1.0, 10**30, 10**400, 1e300, 0.125 + 0j, "0.125", None, [0.125]),
    *(Fraction(1, 8), Decimal("0.125"), sympy.Float(0.125), sympy.Integer(0)),  # which torch brings along
    *(numpy.float16(0.125), numpy.float32(0.125), numpy.float64(0.125), numpy.int64(0), numpy.array(0.125), numpy.array([0.125])),
    *(torch.tensor([0.1, 0.2]), torch.tensor(0.125, requires_grad=True), torch.tensor(True), torch.tensor(0.125 + 0j)),
)


@pytest.mark.filterwarnings("ignore")  # NumPy's, of an array of one element as a number, and ours
@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{type(number).__name__} {number!r}"[:40])
def test_numbers_and_what_is_none(number, dtype, foreach):
    """Each as each option of a group beside another: torch's words and no change, or its bits."""
    options = [{name: number} for name in ("lr", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")]
    for changed in (*options, {"betas": (number, 0.5)}, {"betas": (0.5, number)}):
        outcomes = []
        for cls in (roundpipe_go.Adam, torch.optim.Adam):
            params = [torch.linspace(-1, 1, n, dtype=dtype).requires_grad_() for n in (5, 6)]
            optimizer = cls([{"params": [param]} for param in params], weight_decay=0.1, foreach=foreach)
            for param in params:
                param.grad = torch.full_like(param, 0.3)
            optimizer.step()
            optimizer.param_groups[1].update(changed)
            before = snapshot(optimizer)
            try:
                optimizer.step()
                outcomes.append((None, snapshot(optimizer)))
            except Exception as error:
                outcomes.append((f"{type(error).__name__}: {error}", []))
                if cls is roundpipe_go.Adam:
                    assert_unchanged(before)
        (ours, got), (torchs, want) = outcomes
        assert ours == torchs, changed
        for (name, _, values), (_, _, torchs_values) in zip(got, want, strict=True):
            assert_equal_bits(values, torchs_values, f"{changed}: {name}")


def test_refused_step_leaves_a_pending_backward_alone():
    """Values that are put back are not written, for autograd."""
    param = torch.ones(3, requires_grad=True)
    optimizer = roundpipe_go.Adam([param])
    param.grad = torch.ones(3)
    optimizer.step()
    versions = [tensor._version for _, tensor, _ in snapshot(optimizer)]
    optimizer.param_groups[0]["betas"] = (1.0, 0.9)
    loss = (param * param).sum()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert [tensor._version for _, tensor, _ in snapshot(optimizer)] == versions
    loss.backward()
    assert torch.equal(param.grad, 1 + 2 * param.detach())


@CLASSES
def test_missing_betas_are_told_before_state_is_made(ours):
    for cls in (ours, TORCH_CLASS[ours]):
        param = torch.ones(3, requires_grad=True)
        param.grad = torch.ones(3)
        optimizer = cls([param])
        del optimizer.param_groups[0]["betas"]
        with pytest.raises(KeyError, match="betas"):
            optimizer.step()
        assert len(optimizer.state) == 0


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
@pytest.mark.parametrize("longer", [1, 0, -1])
@pytest.mark.parametrize("at", range(1, 6))
def test_lists_of_other_lengths(at, longer):
    """torch ignores what is too many, and raises where there is too little."""
    outcomes = []
    for adam in (roundpipe_go.adam, torch_adam):
        lists = [[torch.full((4,), 0.5 + i) for _ in range(2)] for i in range(5)] + [[torch.tensor(1.0) for _ in range(2)]]
        written = [(str(i), tensor, tensor.clone()) for i, some in enumerate(lists) for tensor in some]
        lists[at] = (lists[at] * 2)[: 2 + longer]
        error = None
        try:
            adam(*lists, amsgrad=False, beta1=0.9, beta2=0.9, lr=0.1, weight_decay=0.1, eps=1e-8, maximize=False)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            if adam is roundpipe_go.adam:
                assert_unchanged(written)
        outcomes.append((error, [] if error else [tensor for _, tensor, _ in written]))
    (ours, got), (torchs, want) = outcomes
    assert ours == torchs
    for i, (tensor, torchs_tensor) in enumerate(zip(got, want, strict=True)):
        assert_equal_bits(tensor, torchs_tensor, str(i))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
def test_maxima_without_amsgrad_are_not_looked_at(dtype):
    results = []
    for adam in (roundpipe_go.adam, torch_adam):
        lists = [[torch.full((4,), 0.5 + i, dtype=dtype)] for i in range(4)]
        adam(
            *lists,
            [None],
            [torch.tensor(1.0)],
            amsgrad=False,
            beta1=0.9,
            beta2=0.9,
            lr=0.1,
            weight_decay=0,
            eps=1e-8,
            maximize=False,
        )
        results.append(lists[0][0])
    assert_equal_bits(*results, "param")
