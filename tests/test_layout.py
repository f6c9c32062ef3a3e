"""Memory: the layouts that are served, the bytes between views, and what autograd is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import roundpipe_go
from oracle import Twins, assert_equal_bits, randn_like

GUARD = -123.25


def ramp(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


def odd_strides(*shape: int) -> Tensor:
    """The sizes of 1 have strides that no rule would give them."""
    dense = ramp(*shape)
    return dense.as_strided(shape, [99 if size == 1 else stride for size, stride in zip(shape, dense.stride())])


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: ramp(3, 5),
    "scalar": lambda: torch.tensor(0.5),
    "empty": lambda: torch.zeros(0),
    "empty_3d": lambda: torch.zeros(3, 0, 2),
    "one_element": lambda: ramp(1),
    "transposed": lambda: ramp(7, 11).t(),
    "permuted": lambda: ramp(2, 3, 5, 7).permute(3, 0, 2, 1),
    "channels_last": lambda: ramp(4, 3, 5, 6).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: ramp(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "size_one": lambda: odd_strides(1, 4, 1, 6),
    "one_element_strided": lambda: odd_strides(1, 1),
    "offset": lambda: ramp(50)[3:],
    "offset_of_complex": lambda: torch.view_as_complex(ramp(50).reshape(25, 2))[3:],
    "rows": lambda: ramp(9, 5)[2:7],
    "complex_transposed": lambda: torch.view_as_complex(ramp(4, 6, 2)).t(),
    "no_multiple_of_16_bytes": lambda: torch.frombuffer(bytearray(4 * 103), dtype=torch.float32)[1:100],
}


@pytest.mark.parametrize("ours", [roundpipe_go.Adam, roundpipe_go.AdamW], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_served(layout, ours, backend):
    """Served, or the fallback's warning would fail the test; the strides of the state are torch's too."""
    twins = Twins(lambda: [LAYOUTS[layout]().requires_grad_()], ours, lr=0.1, weight_decay=0.0, amsgrad=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for optimizer in twins:
            param = optimizer.param_groups[0]["params"][0]
            param.grad = torch.zeros_like(param).copy_(
                torch.randn(param.shape, dtype=param.dtype, generator=generator.manual_seed(2))
            )
            optimizer.step()
        twins.assert_equal()
    got, want = twins.params[0], twins.torch_params[0]
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert twins.ours.state[got][key].stride() == twins.torch.state[want][key].stride()


@pytest.mark.parametrize("numel", [1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 100, 1023])
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5, 8])
def test_memory_around_views_is_untouched(offset, numel, backend):
    """All four tensors lie in one buffer with guards between them, at any offset from a vector's alignment."""
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    pitch = numel + 9
    buffer = torch.full((offset + pitch * len(names) + 16,), GUARD)
    views = {name: buffer[offset + pitch * i + 5 :][:numel] for i, name in enumerate(names)}
    inside = torch.zeros_like(buffer, dtype=torch.bool)
    for i in range(len(names)):
        inside[offset + pitch * i + 5 :][:numel] = True

    twins = Twins(lambda: [ramp(numel).requires_grad_()], amsgrad=True)
    twins.train(1)
    param = twins.params[0]
    state = twins.ours.state[param]
    for name, view in views.items():
        if name == "param":
            view.copy_(param.detach())
            param.data = view
        elif name != "grad":
            state[name] = view.copy_(state[name])
    views["grad"].copy_(ramp(numel))
    param.grad, twins.torch_params[0].grad = views["grad"], ramp(numel)
    for optimizer in twins:
        optimizer.step()
    twins.assert_equal()
    assert_equal_bits(views["grad"], ramp(numel), "grad")
    outside = buffer[~inside]
    assert_equal_bits(outside, torch.full_like(outside, GUARD), "memory outside of the views")


def test_two_parameters_of_one_buffer():
    """Neighbours in a flat buffer, as sharding tools make them: no element of the other is written."""

    def make():
        buffer = ramp(1000)
        return [buffer[:333].requires_grad_(), buffer[333:334].requires_grad_(), buffer[334:].requires_grad_()]

    twins = Twins(make, lr=0.1)
    twins.train(3)
    twins.step([None, torch.ones(1), None])


def test_parameters_in_shared_memory():
    twins = Twins(lambda: [ramp(1000).share_memory_().requires_grad_()])
    pointer = twins.params[0].data_ptr()
    twins.train(2)
    assert twins.params[0].is_shared()
    assert twins.params[0].data_ptr() == pointer


def test_tensors_stay_where_they_are():
    """Updated in place: the user's parameter, and the state of the first step."""
    twins = Twins(lambda: [ramp(3, 5).requires_grad_()], amsgrad=True)
    twins.train(1)
    param = twins.params[0]
    before = {"param": param.data_ptr(), **{key: t.data_ptr() for key, t in twins.ours.state[param].items()}}
    twins.train(2, seed=1)
    after = {"param": param.data_ptr(), **{key: t.data_ptr() for key, t in twins.ours.state[param].items()}}
    assert after == before


@pytest.mark.parametrize("amsgrad", [False, True])
def test_versions_rise(amsgrad):
    """Of all that is written, and of nothing else."""
    twins = Twins(lambda: [ramp(5).requires_grad_(), ramp(2).requires_grad_()], amsgrad=amsgrad)
    twins.train(1)
    twins.set_grads([torch.ones(5), None])
    param, still = twins.params
    written = [param, *twins.ours.state[param].values()]
    others = [param.grad, still, *twins.ours.state[still].values()]
    before = [t._version for t in written], [t._version for t in others]
    twins.ours.step()
    assert all(t._version > v for t, v in zip(written, before[0]))
    assert [t._version for t in others] == before[1]


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch"])
def test_autograd_notices_the_update(ours):
    """A step between forward and backward makes the saved tensors stale, which autograd must report."""
    param = ramp(5).requires_grad_()
    optimizer = (roundpipe_go.Adam if ours else torch.optim.Adam)([param])
    loss = param.square().sum()
    param.grad = torch.ones(5)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_only_read():
    twins = Twins(lambda: [ramp(1000).requires_grad_()], roundpipe_go.Adam, maximize=True, weight_decay=0.1)
    grad = randn_like(twins.params[0], torch.Generator().manual_seed(3))
    twins.step([grad])
    assert_equal_bits(twins.params[0].grad, grad, "grad")


def test_gradients_that_have_a_graph():
    """As backward(create_graph=True) leaves them: they are numbers like others."""
    twins = Twins(lambda: [ramp(20).requires_grad_()])
    for _ in range(2):
        for optimizer in twins:
            param = optimizer.param_groups[0]["params"][0]
            (param.grad,) = torch.autograd.grad(param.sin().sum(), param, create_graph=True)
            assert param.grad.requires_grad
            optimizer.step()
        twins.assert_equal()
        assert twins.params[0].is_leaf


def test_parameters_may_share_a_gradient():
    """Nobody writes it."""
    grad = ramp(50)
    twins = Twins(lambda: [ramp(50).requires_grad_() for _ in range(3)])
    for param in (*twins.params, *twins.torch_params):
        param.grad = grad
    for _ in range(2):
        for optimizer in twins:
            optimizer.step()
        twins.assert_equal()


def test_step_does_not_leak(backend):
    """No tensor is held after the step, and no cycle keeps the optimizer."""
    import gc
    import weakref

    param = ramp(100).requires_grad_()
    optimizer = roundpipe_go.AdamW([param], amsgrad=True)
    param.grad = torch.ones(100)
    optimizer.step()
    references = [weakref.ref(t) for t in (optimizer, param, param.grad, optimizer.state[param]["exp_avg"])]
    gc.collect()
    gc.disable()
    try:
        del optimizer, param
        assert [reference() for reference in references] == [None] * 4
    finally:
        gc.enable()
