"""What the kernels do not serve: torch's own numbers, one warning per reason, and no step served in part by chance."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import roundpipe_go
from oracle import Twins, assert_unchanged, randn_like, snapshot
from roundpipe_go import FallbackWarning, _binding


def floats(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.linspace(-1, 1, 35).to(dtype).reshape(5, 7).requires_grad_()]


class Subclass(torch.Tensor):
    """Nothing but another type."""


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def strided_state(optimizer: torch.optim.Optimizer) -> None:
    """A moment with the strides of another layout, as after loading a checkpoint by hand."""
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].t().contiguous().t()


def strided_grad(optimizer: torch.optim.Optimizer) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.grad = param.grad.t().contiguous().t()


def expanded_grad(optimizer: torch.optim.Optimizer) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.grad = param.grad[:1].expand(5, 7)


def negative_grad(optimizer: torch.optim.Optimizer) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.view_as_complex(torch.stack([param.grad, param.grad], dim=-1)).conj().imag


def zero_grad(optimizer: torch.optim.Optimizer) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.grad = None
    param.sgn().sum().backward()
    assert param.grad._is_zerotensor()  # without memory of its own


def grad_is_param(optimizer: torch.optim.Optimizer) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.grad = param.detach()


def grad_overlaps_param(optimizer: torch.optim.Optimizer) -> None:
    param = optimizer.param_groups[0]["params"][0]
    buffer = torch.linspace(-1, 1, 70)
    param.data = buffer[:35].view(5, 7)
    param.grad = buffer[10:45].view(5, 7)


def one_moment_for_both(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg_sq"]


def subclass_grad(optimizer: torch.optim.Optimizer) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.grad = param.grad.as_subclass(Subclass)


def moment_of_another_dtype(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].double()


def integer_step(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] = state["step"].to(torch.int64)


def shared_halves() -> list[Tensor]:
    """Two parameters that overlap: the order of their updates is visible."""
    buffer = torch.linspace(-1, 1, 40)
    return [buffer[:30].requires_grad_(), buffer[10:].requires_grad_()]


def twice() -> list[Tensor]:
    param = torch.linspace(-1, 1, 10).requires_grad_()
    return [param, torch.ones(3, requires_grad=True), param]


@dataclass(frozen=True)
class Fallback:
    """A step that is torch's.

    Attributes:
        desc: the test's id.
        reason: a part of the warning.
        make_params: as for Twins.
        options: as for Twins.
        spoil: done to each optimizer before each step, gradients being set.
    """

    desc: str
    reason: str
    make_params: Callable[[], list[Tensor]] = floats
    options: dict[str, Any] = field(default_factory=dict)
    spoil: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None


CASES = [
    Fallback("float16", "not float32, float64", lambda: floats(torch.float16)),
    Fallback("bfloat16", "not float32, float64", lambda: floats(torch.bfloat16)),
    Fallback("fused", "fused=True", options={"fused": True}),
    Fallback("tensor_betas", "betas", options={"betas": (torch.tensor(0.9), torch.tensor(0.99))}),
    Fallback("tensor_weight_decay", "weight_decay", options={"weight_decay": torch.tensor(0.1)}),
    Fallback("tensor_eps", "eps", options={"eps": torch.tensor(1e-8)}),
    Fallback("subclass_param", "subclass", lambda: [leaf(p.detach().as_subclass(Subclass)) for p in floats()]),
    Fallback("subclass_grad", "subclass", spoil=subclass_grad),
    Fallback("strides_of_grad", "order in memory", spoil=strided_grad),
    Fallback("strides_of_state", "order in memory", spoil=strided_state),
    Fallback("expanded_grad", "order in memory", spoil=expanded_grad),
    Fallback("every_second", "order in memory", lambda: [leaf(torch.linspace(-1, 1, 70)[::2])]),
    Fallback("negative_grad", "negative", spoil=negative_grad),
    Fallback("zero_grad", "lazy zero", spoil=zero_grad),
    Fallback("grad_is_param", "share memory", spoil=grad_is_param),
    Fallback("grad_overlaps_param", "share memory", spoil=grad_overlaps_param),
    Fallback("one_moment_for_both", "share memory", spoil=one_moment_for_both),
    Fallback("moment_of_another_dtype", "differ from their parameter", spoil=moment_of_another_dtype),
    Fallback("integer_step", "step counter", spoil=integer_step),
    Fallback("param_twice", "more than once", twice),
]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.desc)
def test_torchs_bits_and_one_warning(case, amsgrad):
    twins = Twins(case.make_params, lr=0.1, amsgrad=amsgrad, **case.options)
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            # The first step makes the state that a case may spoil.
            twins.set_grads([randn_like(param, generator) for param in twins.params])
            for optimizer in twins:
                case.spoil(optimizer)
                optimizer.step()
            twins.assert_equal()
    messages = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
    assert len(messages) == 1, messages
    assert messages[0].startswith("roundpipe_go: ")
    assert case.reason in messages[0]
    ours = next(w for w in caught if issubclass(w.category, FallbackWarning))
    assert ours.filename == __file__, "the warning points at the caller of step"


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.desc)
def test_warning_as_error_changes_nothing(case):
    """Of the parameters that are served beside it neither."""
    twins = Twins(case.make_params, lr=0.1, **case.options)
    beside = torch.ones(9, requires_grad=True)
    twins.ours.add_param_group({"params": [beside]})
    generator = torch.Generator().manual_seed(2)

    def set_grads():
        for param in [*twins.params]:
            param.grad = randn_like(param, generator)
        case.spoil(twins.ours)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        set_grads()
        twins.ours.step()
    set_grads()
    before = snapshot(twins.ours)
    roundpipe_go._fallback._warned.clear()
    with pytest.raises(FallbackWarning, match=case.reason):
        twins.ours.step()
    assert_unchanged(before)


def test_gradient_of_inference_mode_is_served():
    """It is only read. A moment of inference mode is torch's to refuse, and nothing changes."""
    twins = Twins(floats, lr=0.1)
    twins.set_grads([torch.ones_like(param) for param in twins.params])
    for optimizer in twins:
        with torch.inference_mode():
            for param in optimizer.param_groups[0]["params"]:
                param.grad = param.grad.clone()
        optimizer.step()
    twins.assert_equal()

    for optimizer in twins:
        with torch.inference_mode():
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"].clone()
    before = snapshot(twins.ours)
    errors = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for optimizer in twins:
            with pytest.raises(RuntimeError) as error:
                optimizer.step()
            errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert_unchanged(before)


def test_served_and_unserved_side_by_side(backend):
    """Parameters of one group, each computed where it belongs, in the bits of torch."""

    def make():
        generator = torch.Generator().manual_seed(3)
        dtypes = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float32]
        return [torch.randn(40, generator=generator).to(dtype).requires_grad_() for dtype in dtypes]

    twins = Twins(make, roundpipe_go.Adam, amsgrad=True, lr=0.1)
    with pytest.warns(FallbackWarning) as caught:
        twins.train(4)
    assert len(caught) == 1


def test_each_reason_has_its_warning():
    """Two reasons in one step: both are told, and the step is taken once."""
    twins = Twins(lambda: [*floats(torch.bfloat16), leaf(torch.linspace(-1, 1, 70)[::2]), *floats()], lr=0.1)
    with pytest.warns(FallbackWarning) as caught:
        twins.train(2)
    assert len(caught) == 2
    assert twins.ours.state[twins.params[0]]["step"].item() == 2.0


def test_failure_beside_other_fallbacks_changes_nothing():
    """torch raises for the last parameter; the bfloat16 one before it is torch's too, and must not have moved."""
    twins = Twins(lambda: [*floats(torch.bfloat16), *floats(), *floats()])
    with pytest.warns(FallbackWarning):
        twins.train(1)
    for optimizer in twins:
        optimizer.state[optimizer.param_groups[0]["params"][-1]]["exp_avg"] = torch.zeros(3)
    twins.set_grads([randn_like(param, torch.Generator().manual_seed(4)) for param in twins.params])
    with pytest.warns(FallbackWarning):
        twins.assert_equal_errors(lambda optimizer: optimizer.step())


def test_steps_in_inference_mode():
    """Ordinary tensors are served there too; a state made there is torch's for ever, as torch marks it."""
    twins = Twins(floats)
    twins.train(1)
    twins.set_grads([torch.ones(5, 7)])
    with torch.inference_mode():
        for optimizer in twins:
            optimizer.step()
    twins.assert_equal()
    twins.train(1, seed=2)
    fresh = Twins(floats)
    with torch.inference_mode(), pytest.warns(FallbackWarning, match="inference mode"):
        fresh.train(2)


def test_parameters_that_overlap_each_other():
    """No fallback: the rows run in order on one thread, and an element is read when its turn comes."""
    twins = Twins(shared_halves, lr=0.1)
    twins.train(4)


def test_one_warning_per_process_and_reason():
    optimizers = [roundpipe_go.Adam(floats(torch.bfloat16)) for _ in range(3)]
    for optimizer in optimizers:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
    with pytest.warns(FallbackWarning):
        optimizers[0].step()
    for optimizer in optimizers:
        optimizer.step()  # a warning would be an error here


def test_nothing_to_do_does_not_warn():
    twins = Twins(lambda: floats(torch.bfloat16))
    twins.step([None])
    assert len(twins.ours.state) == 0


def test_capturable_is_refused_as_by_torch():
    twins = Twins(floats, capturable=True)
    twins.set_grads([torch.ones(5, 7)])
    with pytest.warns(FallbackWarning, match="capturable"):
        error = twins.assert_equal_errors(lambda optimizer: optimizer.step())
    assert isinstance(error, AssertionError)


def test_differentiable_step_has_torchs_gradient():
    gradients = []
    for cls in (roundpipe_go.Adam, torch.optim.Adam):
        start = torch.linspace(-1, 1, 7).requires_grad_()
        param = start.clone()
        optimizer = cls([param], lr=0.1, differentiable=True)
        param.grad = (start * 3).sin()
        if cls is roundpipe_go.Adam:
            with pytest.warns(FallbackWarning, match="differentiable"):
                optimizer.step()
        else:
            optimizer.step()
        param.square().sum().backward()
        gradients.append(start.grad)
    assert torch.equal(*gradients)
    assert gradients[0].abs().min() > 0


def test_watching_dispatch_mode_sees_torchs_operations():
    class Watch(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    def watched(optimizer):
        with Watch() as watch:
            optimizer.step()
        return watch.names

    twins = Twins(floats)
    twins.train(1)
    twins.set_grads([torch.ones(5, 7)])
    with pytest.warns(FallbackWarning, match="dispatch mode"):
        seen = watched(twins.ours)
    assert seen == watched(twins.torch)
    assert any("addcdiv" in name for name in seen)
    twins.assert_equal()


def test_compiled_step_is_torchs_compiled_step():
    """A compiler takes other formulas than eager torch; ours must be taken the same way."""
    twins = Twins(floats, lr=0.1)
    twins.set_grads([torch.ones(5, 7)])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a compiled warning may be traced away, and torch warns of its own
            for optimizer in twins:
                torch.compile(optimizer.step, backend="eager")()
    finally:
        torch._dynamo.reset()
    twins.assert_equal()


def test_meta_parameters_fall_back():
    param = torch.ones(3, device="meta", requires_grad=True)
    optimizer = roundpipe_go.AdamW([param])
    param.grad = torch.ones_like(param)
    with pytest.warns(FallbackWarning, match="not on the CPU"):
        optimizer.step()
    assert optimizer.state[param]["exp_avg"].is_meta


FORK = """
import os, sys, warnings
import torch, roundpipe_go
torch.set_num_threads(1)
param = torch.linspace(-1, 1, 9).requires_grad_()
optimizer = roundpipe_go.Adam([param])
param.grad = torch.ones(9)
if sys.argv[1] == "after":
    optimizer.step()
child = os.fork()
if child == 0:
    want = torch.optim.Adam([torch.nn.Parameter(param.detach().clone())])
    want.load_state_dict(optimizer.state_dict())
    want.param_groups[0]["params"][0].grad = torch.ones(9)
    want.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    want.step()
    equal = torch.equal(param, want.param_groups[0]["params"][0])
    print(equal, [str(w.message) for w in caught], flush=True)
    os._exit(0)
os.waitpid(child, 0)
optimizer.step()
print("parent", optimizer.state[param]["step"].item())
"""


@pytest.mark.parametrize(("moment", "warns"), [("before", False), ("after", True)])
def test_forked_child(moment, warns):
    """A child forked after the Go runtime has started takes torch's path; one forked before has its own runtime."""
    run = subprocess.run([sys.executable, "-c", FORK, moment], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    child, parent = run.stdout.splitlines()
    assert child.startswith("True "), child
    assert ("forked" in child) == warns, child
    assert child.count("roundpipe_go:") == warns, child
    assert parent == f"parent {2.0 if warns else 1.0}"


def test_go_is_not_entered_in_a_forked_child(monkeypatch):
    """It may wait for threads that the fork has left behind, also in calls that compute nothing."""
    _binding.backends()  # loads it
    monkeypatch.setattr(_binding, "_forked", True)
    entries: list[Callable[[], Any]] = [
        lambda: _binding.step([]),
        lambda: _binding.sqrt(0, 0, 0, dtype=torch.float32, backend=0, square_root=0),
        lambda: _binding.library_square_root.__wrapped__(torch.float32),
        _binding.build_info,
        _binding._module,
    ]
    for enter in entries:
        with pytest.raises(RuntimeError, match=r"^roundpipe_go: this process was forked .*; start workers by spawn"):
            enter()
    info = roundpipe_go.build_info()
    assert info["forked"]
    assert info["extension"].startswith("error: roundpipe_go: this process was forked"), info
    assert info["go"] is None
    assert info["backend"] in info["backends"]
    assert roundpipe_go.get_backend() == info["backend"], "is known from the parent"
    assert _binding.plain_step() is None


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
@pytest.mark.parametrize("of", ["parameter", "moment", "view"])
def test_lr_in_memory_that_the_step_writes(of):
    """A learned lr: torch reads it when it comes to the group that has it."""
    results = []
    for cls in (roundpipe_go.Adam, torch.optim.Adam):
        lr, weights = torch.tensor(0.1, requires_grad=True), torch.ones(2, requires_grad=True)
        optimizer = cls([{"params": [lr], "lr": 1e-2}, {"params": [weights], "lr": 1e-2}])
        for step in range(4):
            lr.grad, weights.grad = torch.tensor(-1.0), -torch.ones(2)
            if step == 1:
                shared = {"parameter": lr, "view": lr.detach(), "moment": optimizer.state[lr]["exp_avg_sq"]}[of]
                optimizer.param_groups[1]["lr"] = shared
            optimizer.step()
        results.append([lr.item(), *weights.tolist()])
    assert results[0] == results[1]
