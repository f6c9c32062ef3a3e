"""Modes, contexts and utilities of torch around an optimizer: torch's bits, or torch's exception."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

import roundpipe_go
from oracle import Twins, assert_equal_bits, params_of
from roundpipe_go import FallbackWarning


def make_params() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, device="cpu")) for shape in [(5, 7), (33,), ()]]


class PassOn(TorchFunctionMode):
    """Changes nothing, as a mode that counts or logs."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AROUND: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "torch_function_mode": PassOn,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "deterministic_algorithms": deterministic_algorithms,
    "default_dtype": lambda: default_dtype(torch.float64),
    "default_device": lambda: torch.device("cpu"),
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "one_backward_thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "record_function": lambda: torch.profiler.record_function("step"),
}


def step_with_ones(optimizer: torch.optim.Optimizer) -> None:
    for param in params_of(optimizer):
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("from_the_first_step", [True, False])
@pytest.mark.parametrize("name", AROUND)
def test_served_within(name, from_the_first_step):
    """In Go: a fallback would be an error. The state of the first step is made within as well, or before."""
    twins = Twins(make_params, lr=0.1)
    if not from_the_first_step:
        twins.train(1)
    for _ in range(2):
        for optimizer in twins:
            with AROUND[name]():
                step_with_ones(optimizer)
        twins.assert_equal()
    twins.train(1)


def test_constructed_and_trained_in_float64_by_default():
    with default_dtype(torch.float64):
        twins = Twins(lambda: [torch.linspace(-1, 1, 9).requires_grad_()])
        twins.train(3)
    assert twins.params[0].dtype is torch.float64


def outcome(action: Callable[[], object]) -> tuple[type, str] | None:
    try:
        action()
    except Exception as error:
        return type(error), str(error)
    return None


def assert_same_outcome(twins: Twins, action: Callable[[torch.optim.Optimizer], object]) -> tuple[type, str] | None:
    """Both do it, or both raise the same; ours has then changed nothing, or what torch has, since torch was at work."""
    before = [param.detach().clone() for param in twins.params]
    got, want = (outcome(functools.partial(action, optimizer)) for optimizer in twins)
    assert got == want
    if want is None or not all(map(torch.equal, before, twins.params)):
        twins.assert_equal()
    return want


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
@pytest.mark.parametrize("from_the_first_step", [True, False])
def test_meta_as_default_device(from_the_first_step):
    twins = Twins(make_params)
    if not from_the_first_step:
        twins.train(1)

    def action(optimizer):
        with torch.device("meta"):
            for param in params_of(optimizer):
                param.grad = torch.ones_like(param, device="cpu")
            optimizer.step()

    assert_same_outcome(twins, action)


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
@pytest.mark.parametrize("step_within", [True, False])
def test_constructed_in_inference_mode(step_within):
    """Parameters of inference mode are refused outside of it, and updated inside."""
    with torch.inference_mode():
        twins = Twins(lambda: [torch.linspace(-1, 1, 9)])

    def action(optimizer):
        with torch.inference_mode(step_within):
            step_with_ones(optimizer)

    assert (assert_same_outcome(twins, action) is None) == step_within


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_fake_tensors(options):
    """Parameters without values, which Go must not see."""
    mode = FakeTensorMode()
    with mode:
        twins = Twins(lambda: [torch.ones(9, requires_grad=True)], **options)

    def action(optimizer):
        with mode:
            step_with_ones(optimizer)

    got, want = (outcome(functools.partial(action, optimizer)) for optimizer in twins)
    assert got == want
    for optimizer in twins:
        for param, state in optimizer.state.items():
            assert isinstance(param, FakeTensor)
            assert isinstance(state["exp_avg"], FakeTensor)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_step_within_a_transform(transform):
    twins = Twins(make_params)
    twins.train(1)

    def action(optimizer):
        def inner(scale):
            for param in params_of(optimizer):
                param.grad = torch.ones_like(param).detach() * (scale if transform == "vmap" else 1.0)
            optimizer.step()
            return scale.sum()

        if transform == "vmap":
            torch.func.vmap(inner)(torch.ones(3))
        else:
            torch.func.grad(inner)(torch.ones(()))

    with pytest.warns(FallbackWarning, match="traced"):
        refused = assert_same_outcome(twins, action)
    assert refused is not None


def test_gradients_by_functional_call():
    """``torch.func.grad`` over a functional model, also per sample by ``vmap``: gradients that no backward made."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    names = [name for name, _ in model.named_parameters()]
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    start = {name: param.detach().clone() for name, param in model.named_parameters()}

    def loss(params, sample):
        return torch.func.functional_call(model, params, (sample,)).square().sum()

    twins = Twins(lambda: [start[name].clone().requires_grad_() for name in names])
    for _ in range(3):
        for optimizer in twins:
            params = dict(zip(names, params_of(optimizer)))
            grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, inputs)
            for name, param in params.items():
                param.grad = grads[name].mean(0).detach()
            optimizer.step()
        twins.assert_equal()


@torch.library.custom_op("roundpipe_go_tests::scaled_sin", mutates_args=())
def scaled_sin(x: Tensor, scale: float) -> Tensor:
    return scale * torch.sin(x)


scaled_sin.register_autograd(
    lambda ctx, grad: (grad * ctx.scale * torch.cos(*ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(inputs[0]), setattr(ctx, "scale", inputs[1])),
)


def test_custom_operator_in_the_model():
    twins = Twins(make_params)
    for _ in range(3):
        for optimizer in twins:
            optimizer.zero_grad()
            sum(scaled_sin(param, 0.3).sum() for param in params_of(optimizer)).backward()
            optimizer.step()
        twins.assert_equal()


def test_state_dict_hooks():
    """All four kinds: order, arguments, and hooks that replace what is saved and loaded."""
    calls: dict[type, list[str]] = {}
    twins = Twins(make_params)
    twins.train(2)
    for optimizer in twins:
        seen = calls.setdefault(type(optimizer), [])

        def doubled(of, state_dict, seen=seen):
            seen.append("saved")
            return {**state_dict, "param_groups": [{**group, "lr": 2 * group["lr"]} for group in state_dict["param_groups"]]}

        def halved(of, state_dict, seen=seen):
            seen.append("load")
            state = {key: {**value, "exp_avg": value["exp_avg"] / 2} for key, value in state_dict["state"].items()}
            return {**state_dict, "state": state}

        optimizer.register_state_dict_pre_hook(lambda of, seen=seen: seen.append("save"))
        optimizer.register_state_dict_post_hook(doubled)
        optimizer.register_load_state_dict_pre_hook(halved)
        optimizer.register_load_state_dict_post_hook(lambda of, seen=seen: seen.append("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups[0]["lr"] == 2e-3
    twins.train(2, seed=1)
    ours, theirs = calls.values()
    assert ours == theirs == ["save", "saved", "load", "loaded"]


@pytest.mark.parametrize("key", ["param", "exp_avg", "exp_avg_sq", "step"])
def test_swap_tensors(key):
    """Another tensor's inside under the same object: other values at another address."""
    twins = Twins(lambda: [nn.Parameter(torch.linspace(-1, 1, 9))])
    twins.train(2)
    for optimizer in twins:
        (param,) = params_of(optimizer)
        tensor = param if key == "param" else optimizer.state[param][key]
        other = torch.tensor(7.0) if key == "step" else torch.linspace(1, 2, 9)
        param.grad = None
        torch.utils.swap_tensors(tensor, nn.Parameter(other) if key == "param" else other)
    twins.train(2, seed=1)


@pytest.mark.parametrize("swap", [False, True])
def test_module_converted_and_back(swap):
    """By new data or by swapped tensors, state moved by hand: float64 in the middle, in Go as well."""
    start = nn.Linear(5, 3).state_dict()
    models = []

    def make():
        model = nn.Linear(5, 3)
        model.load_state_dict(start)
        models.append(model)
        return list(model.parameters())

    twins = Twins(make)
    twins.train(2)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for dtype in (torch.float64, torch.float32):
            for optimizer, model in zip(twins, models):
                params = list(model.parameters())
                optimizer.zero_grad()
                model.to(dtype)
                assert all(old is new for old, new in zip(params, model.parameters()))
                for param in params:
                    state = optimizer.state[param]
                    state.update({name: value.to(dtype) for name, value in state.items() if name != "step"})
            twins.train(2)
            assert twins.params[0].dtype is dtype
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


INTEROP = """
import torch
torch.set_num_interop_threads(3)
torch.set_num_threads(2)
import roundpipe_go
params = []
for cls in (roundpipe_go.AdamW, torch.optim.AdamW):
    torch.manual_seed(0)
    param = torch.randn(300_000, requires_grad=True)
    optimizer = cls([param], lr=0.1)
    for _ in range(3):
        waits = [torch.jit.fork(torch.sin, param.detach()) for _ in range(4)]
        param.grad = torch.randn(300_000)
        optimizer.step()
        for wait in waits:
            torch.jit.wait(wait)
    params.append(param.detach())
assert torch.get_num_interop_threads() == 3
assert torch.equal(*params)
print("equal")
"""


def test_interop_threads():
    """Beside threads of torch that compute at the same time. They are set once in a process, so in one of its own."""
    run = subprocess.run([sys.executable, "-c", INTEROP], capture_output=True, text=True, timeout=120)
    assert run.stdout == "equal\n", run.stderr


def test_functional_form_within_a_mode():
    from torch.optim.adam import adam as torch_adam

    results = []
    for function in (roundpipe_go.adam, torch_adam):
        lists = [[torch.linspace(-1, 1, 9)], [torch.ones(9)], [torch.zeros(9)], [torch.zeros(9)], [], [torch.tensor(0.0)]]
        with PassOn(), torch.no_grad():
            options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.99, "lr": 0.1, "weight_decay": 0.1, "eps": 1e-8}
            function(*lists, maximize=False, **options)
        results.append(lists)
    for got, want in zip(results[0], results[1]):
        for g, w in zip(got, want):
            assert_equal_bits(g, w, "functional")


@pytest.mark.parametrize("key", ["param", "exp_avg", "exp_avg_sq"])
def test_negative_view_under_a_known_tensor(key):
    """By ``.data``, which keeps the object: what was looked at in the step before may be something else now."""
    twins = Twins(lambda: [nn.Parameter(torch.linspace(-1, 1, 9))])
    twins.train(2)
    for optimizer in twins:
        (param,) = params_of(optimizer)
        tensor = param if key == "param" else optimizer.state[param][key]
        tensor.data = torch._neg_view(torch.linspace(-2, -1, 9))
        assert tensor.is_neg()
    with pytest.warns(FallbackWarning, match="negative"):
        twins.train(2, seed=1)
