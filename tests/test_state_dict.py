"""State goes from torch to us and back at any step, in every form in which people keep it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor

import roundpipe_go
from cases import VARIANTS
from oracle import TORCH_CLASS, Twins, assert_equal_bits, assert_equal_state, params_of, randn_like

SHAPES = [(5,), (3, 4), (), (130,)]


def make_params() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, dtype=torch.float32, generator=generator).requires_grad_() for shape in SHAPES]


def saved_and_loaded(state_dict: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def step_all(optimizers: list[torch.optim.Optimizer], steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        grads = [randn_like(param, generator) for param in params_of(optimizers[0])]
        for optimizer in optimizers:
            for param, grad in zip(params_of(optimizer), grads):
                param.grad = grad.clone()
            optimizer.step()


def copied_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param.detach().clone().requires_grad_() for param in params_of(optimizer)]


def assert_equal_optimizers(got: torch.optim.Optimizer, want: torch.optim.Optimizer) -> None:
    for i, (g, w) in enumerate(zip(params_of(got), params_of(want), strict=True)):
        assert_equal_bits(g, w, f"params[{i}]")
        assert_equal_state(got.state[g], want.state[w], f"params[{i}]")


def assert_equal_dicts(got: dict, want: dict) -> None:
    assert list(got) == list(want)
    assert got["param_groups"] == want["param_groups"]
    assert list(got["state"]) == list(want["state"])
    for i, state in want["state"].items():
        assert_equal_state(got["state"][i], state, f"state[{i}]")


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant[0])
def test_state_dict_is_that_of_torch(variant):
    _, ours, decay, flags = variant
    twins = Twins(make_params, ours, **decay, **flags)
    assert_equal_dicts(twins.ours.state_dict(), twins.torch.state_dict())
    twins.train(2)
    assert_equal_dicts(twins.ours.state_dict(), twins.torch.state_dict())
    assert repr(twins.ours) == repr(twins.torch)


@pytest.mark.parametrize("form", [lambda d: d, copy.deepcopy, saved_and_loaded], ids=["as_is", "deepcopy", "saved"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant[0])
def test_training_changes_hands_in_the_middle(variant, form, backend):
    """torch -> ours -> torch -> ours, beside one torch optimizer that goes through."""
    _, ours, decay, flags = variant
    options = {**decay, **flags}
    through = TORCH_CLASS[ours](make_params(), **options)
    optimizer = TORCH_CLASS[ours](make_params(), **options)
    for turn, cls in enumerate((None, ours, TORCH_CLASS[ours], ours)):
        if cls is not None:
            successor = cls(copied_params(optimizer), lr=123.0)  # the options come from the state_dict
            successor.load_state_dict(form(optimizer.state_dict()))
            optimizer = successor
        step_all([optimizer, through], 2, seed=turn)
        assert_equal_optimizers(optimizer, through)


OLD_FORMS = {
    "int_step": lambda state, group: state.update(step=int(state["step"])),
    "float_step": lambda state, group: state.update(step=float(state["step"])),
    "step_of_one_element": lambda state, group: state.update(step=state["step"].reshape(1)),
    "float64_step": lambda state, group: state.update(step=state["step"].double()),
    "float16_moments": lambda state, group: state.update(exp_avg=state["exp_avg"].half()),
    "no_new_keys": lambda state, group: [
        group.pop(key, None)
        for key in ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
    ],
    "unknown_key": lambda state, group: (state.update(note="kept"), group.update(initial_lr=1e-3)),
}


@pytest.mark.parametrize("form", OLD_FORMS)
@pytest.mark.parametrize("ours", TORCH_CLASS, ids=lambda cls: cls.__name__)
def test_old_checkpoints(ours, form, backend):
    twins = Twins(make_params, ours, weight_decay=0.1)
    twins.train(3)
    checkpoint = copy.deepcopy(twins.torch.state_dict())
    for state in checkpoint["state"].values():
        OLD_FORMS[form](state, checkpoint["param_groups"][0])
    for optimizer in twins:
        optimizer.load_state_dict(copy.deepcopy(checkpoint))
    twins.assert_equal()
    twins.train(2, seed=1)
    assert_equal_dicts(twins.ours.state_dict(), twins.torch.state_dict())


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("ours", TORCH_CLASS, ids=lambda cls: cls.__name__)
def test_copies_go_on_alone(ours, copier):
    twins = Twins(make_params, ours, amsgrad=True)
    twins.train(2)
    original = twins.ours
    values = [param.detach().clone() for param in twins.params]
    twins.ours, twins.torch = copier(twins.ours), copier(twins.torch)
    assert type(twins.ours) is ours
    twins.train(3, seed=1)
    for i, (param, value) in enumerate(zip(params_of(original), values)):
        assert_equal_bits(param, value, f"original params[{i}]")


def test_nothing_lives_outside_of_the_state():
    """A new object over the same tensors with the same state goes on bit for bit."""
    twins = Twins(make_params)
    twins.train(2)
    successor = roundpipe_go.AdamW(twins.params)
    successor.load_state_dict(twins.ours.state_dict())
    assert vars(successor).keys() == vars(twins.ours).keys()
    twins.ours = successor
    twins.train(2, seed=1)


def test_weights_only_file_loads_into_both():
    twins = Twins(make_params, roundpipe_go.Adam, lr=torch.tensor(1e-2), weight_decay=0.0)
    twins.train(2)
    state_dict = saved_and_loaded(twins.ours.state_dict())
    for optimizer in twins:
        optimizer.load_state_dict(copy.deepcopy(state_dict))
    twins.train(2, seed=1)
    assert twins.ours.state[twins.params[0]]["step"].item() == 4.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_counter_follows_the_default_dtype(dtype, backend):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        twins = Twins(make_params)
        twins.train(3)
    finally:
        torch.set_default_dtype(before)
    want = torch.float64 if dtype is torch.float64 else torch.float32
    assert twins.ours.state[twins.params[0]]["step"].dtype == want
    twins.train(2, seed=1)


def test_float64_counter_passes_2_to_the_24(backend):
    twins = Twins(make_params, roundpipe_go.Adam)
    twins.train(1)
    for optimizer in twins:
        for state in optimizer.state.values():
            state["step"] = torch.tensor(2.0**24, dtype=torch.float64)
    twins.train(2)
    assert twins.ours.state[twins.params[0]]["step"].item() == 2.0**24 + 2


def test_named_parameters():
    def named():
        return [(f"layer.{i}", param) for i, param in enumerate(make_params())]

    twins = Twins(named)
    twins.train(2)
    assert twins.ours.param_groups[0]["param_names"] == [f"layer.{i}" for i in range(len(SHAPES))]
    assert_equal_dicts(twins.ours.state_dict(), twins.torch.state_dict())
    unnamed = roundpipe_go.AdamW(make_params())
    unnamed.load_state_dict(twins.torch.state_dict())
    assert unnamed.state_dict()["param_groups"] == twins.torch.state_dict()["param_groups"]


def test_complex_state(backend):
    """Both moments are complex tensors, as in torch, and are not cast on loading."""

    def make():
        return [torch.view_as_complex(torch.arange(14.0).reshape(7, 2)).clone().requires_grad_()]

    twins = Twins(make, roundpipe_go.Adam, amsgrad=True)
    twins.train(2)
    state_dict = saved_and_loaded(twins.ours.state_dict())
    assert {state_dict["state"][0][key].dtype for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")} == {torch.complex64}
    for optimizer in twins:
        optimizer.load_state_dict(copy.deepcopy(state_dict))
    twins.train(2, seed=1)


def test_groups_and_frozen_parameters():
    """Groups with options of their own; a parameter without a gradient has no state and does not count."""

    def groups():
        a, b, c, d = make_params()
        return [{"params": [a, b], "lr": 0.1, "betas": (0.5, 0.9)}, {"params": [c, d], "weight_decay": 0.3, "amsgrad": True}]

    twins = Twins(groups, roundpipe_go.AdamW)
    generator = torch.Generator().manual_seed(2)
    for i in range(6):
        twins.step([None if (i + j) % 3 == 0 else randn_like(p, generator) for j, p in enumerate(twins.params)])
    assert_equal_dicts(twins.ours.state_dict(), twins.torch.state_dict())
    untouched = Twins(make_params)
    untouched.step([None] * 4)
    assert len(untouched.ours.state) == 0


def test_checkpoint_of_another_shape_is_refused_as_by_torch():
    twins = Twins(make_params)
    twins.train(1)
    other = torch.optim.AdamW(make_params()[:2])
    error = twins.assert_equal_errors(lambda optimizer: optimizer.load_state_dict(other.state_dict()))
    assert "doesn't match the size" in str(error)
    twins.train(1)


def test_state_cleared_starts_again():
    twins = Twins(make_params)
    twins.train(3)
    for optimizer in twins:
        optimizer.state.clear()
    twins.train(2)
    assert twins.ours.state[twins.params[0]]["step"].item() == 2.0


def test_state_of_other_kinds_is_loaded_and_copied():
    """Users keep things of their own in ``state``, which torch does not touch."""
    twins = Twins(lambda: [torch.ones(3).requires_grad_()], lr=0.1)
    twins.train(1)
    for optimizer in twins:
        optimizer.state["note"] = 3
        saved = optimizer.state_dict()
        saved["state"]["note"] = "of the user"
        optimizer.load_state_dict(saved)
        assert copy.deepcopy(optimizer).state["note"] == optimizer.state["note"]
    twins.train(2)
    twins.assert_equal()
