"""What torch itself puts around an optimizer: averaging, scaling, hooks, compilers, profilers."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

from roundpipe_go import _fallback

from .training import (
    CLASSES,
    OPTIONS,
    assert_same_bits,
    both_classes,
    compare,
    copied,
    loss_of,
    make_batches,
    make_model,
    record,
)

STEPS = 5


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


@both_classes
def test_stochastic_weight_averaging(name):
    def train(optimizer_class):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))
        optimizer = optimizer_class(model.parameters(), **OPTIONS)
        average, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
        for batch in make_batches(STEPS):
            step(model, optimizer, batch)
            average.update_parameters(model)
            schedule.step()
        update_bn([inputs for inputs, _ in make_batches(2)], average)
        return record(model, optimizer), copied(average.state_dict())

    compare(train, name, num_steps=STEPS)


@both_classes
def test_exponential_moving_average(name):
    def train(optimizer_class):
        model = make_model()
        optimizer = optimizer_class(model.parameters(), **OPTIONS)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for batch in make_batches(STEPS):
            step(model, optimizer, batch)
            average.update_parameters(model)
        return record(model, optimizer), copied(average.state_dict())

    compare(train, name, num_steps=STEPS)


@both_classes
def test_grad_scaler(name):
    """A scale that grows, and a step that the scaler leaves out because a gradient is infinite."""

    def train(optimizer_class):
        model = make_model()
        optimizer = optimizer_class(model.parameters(), **OPTIONS)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales = []
        for i, batch in enumerate(make_batches(STEPS)):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            if i == 2:
                next(model.parameters()).grad[0] = torch.inf
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
        return record(model, optimizer)

    compare(train, name, num_steps=STEPS - 1)


@both_classes
def test_optimizer_in_backward_by_hooks(name):
    """One optimizer a parameter, stepped from the autograd engine; the gradient is freed at once."""

    def train(optimizer_class):
        model = make_model()
        optimizers = {param: optimizer_class([param], **OPTIONS) for param in model.parameters()}

        def update(param):
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in optimizers:
            param.register_post_accumulate_grad_hook(update)
        for batch in make_batches(STEPS):
            loss_of(model, batch).backward()
        assert all(param.grad is None for param in optimizers)
        return record(model, *optimizers.values())

    compare(train, name, num_steps=STEPS * len(list(make_model().parameters())))


@both_classes
def test_apply_optimizer_in_backward(name):
    """The same by torch.distributed's function, and with the gradients kept."""

    def train(optimizer_class):
        model = make_model()
        _apply_optimizer_in_backward(optimizer_class, model.parameters(), OPTIONS)
        for batch in make_batches(STEPS):
            loss_of(model, batch).backward()
        return record(model, *_get_in_backward_optimizers(model))

    compare(train, name, num_steps=STEPS * len(list(make_model().parameters())))


@both_classes
def test_host_copies(name):
    """The pattern of CPU offload: one optimizer a host copy, a plain tensor whose ``grad`` is filled from outside."""

    def train(optimizer_class):
        model = make_model()
        copies = {param: param.detach().clone() for param in model.parameters()}
        for host in copies.values():
            host.grad = torch.empty_like(host)
        optimizers = {param: optimizer_class([{"params": host}], **OPTIONS) for param, host in copies.items()}
        for batch in make_batches(STEPS):
            model.zero_grad()
            loss_of(model, batch).backward()
            for param, host in copies.items():
                host.grad.copy_(param.grad)
                optimizers[param].step()
                param.data.copy_(host)
        return record(model, *optimizers.values())

    compare(train, name, num_steps=STEPS * len(list(make_model().parameters())))


@both_classes
def test_data_loader_workers(name):
    """A data loader forks its workers anew in each epoch, from the second on out of a process that has Go in it."""

    def train(optimizer_class):
        model = make_model()
        optimizer = optimizer_class(model.parameters(), **OPTIONS)
        inputs, targets = (torch.cat(tensors) for tensors in zip(*make_batches(2)))
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=12, num_workers=2, timeout=60)
        for _ in range(3):
            for batch in loader:
                step(model, optimizer, batch)
        return record(model, optimizer)

    compare(train, name, num_steps=6)


@both_classes
def test_lr_tensor_changed_in_place(name):
    def train(optimizer_class):
        model = make_model()
        lr = torch.tensor(OPTIONS["lr"])
        optimizer = optimizer_class(model.parameters(), **{**OPTIONS, "lr": lr})
        for batch in make_batches(STEPS):
            step(model, optimizer, batch)
            lr.mul_(0.7)
        assert optimizer.param_groups[0]["lr"] is lr
        return record(model, optimizer)

    compare(train, name, num_steps=STEPS)


@both_classes
def test_step_hooks(name):
    """Hooks of the process and of one optimizer: order, arguments, and a pre-hook that changes the gradients."""

    def train(optimizer_class):
        model = make_model()
        optimizer = optimizer_class(model.parameters(), **OPTIONS)
        calls = []

        def hook(label):
            def call(of, args, kwargs):
                assert of is optimizer
                calls.append((label, len(args), sorted(kwargs)))
                if label == "pre":
                    for param in model.parameters():
                        param.grad.mul_(0.5)

            return call

        handles = [
            register_optimizer_step_pre_hook(hook("global pre")),
            register_optimizer_step_post_hook(hook("global post")),
            optimizer.register_step_pre_hook(hook("pre")),
            optimizer.register_step_post_hook(hook("post")),
        ]
        try:
            for batch in make_batches(STEPS):
                step(model, optimizer, batch)
        finally:
            for handle in handles:
                handle.remove()
        step(model, optimizer, make_batches(1)[0])
        assert len(calls) == 4 * STEPS
        return record(model, optimizer), calls

    compare(train, name, num_steps=STEPS + 1)


@both_classes
def test_pre_hook_replaces_the_closure(name):
    def train(optimizer_class):
        model = make_model()
        optimizer = optimizer_class(model.parameters(), **OPTIONS)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, make_batches(1)[0])
            loss.backward()
            return loss

        optimizer.register_step_pre_hook(lambda of, args, kwargs: ((of, closure), {}))
        losses = [optimizer.step().item() for _ in range(STEPS)]
        return record(model, optimizer), losses

    compare(train, name, num_steps=STEPS)


@both_classes
def test_profiler_names_the_step(name):
    def train(optimizer_class):
        model = make_model()
        optimizer = optimizer_class(model.parameters(), **OPTIONS)
        batch = make_batches(1)[0]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(model, optimizer, batch)
        return sorted(event.key for event in profile.key_averages() if event.key.startswith("Optimizer."))

    compare(train, name, num_steps=1)
    assert train(CLASSES[name][1]) == [f"Optimizer.step#{name}.step", f"Optimizer.zero_grad#{name}.zero_grad"]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@both_classes
def test_compiled_step(name, compiler):
    """What is compiled is torch's own step, in which the compiler sets another formula than an eager step has."""

    def train(optimizer_class):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Linear(9, 5)
        optimizer = optimizer_class(model.parameters(), **OPTIONS)
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        compiled = torch.compile(optimizer.step, backend=compiler)
        for batch in make_batches(3):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            compiled()
        return record(model, optimizer), calls

    torch_class, go_class = CLASSES[name]
    want = train(torch_class)
    with mock.patch.object(_fallback, "warn"):
        got = train(go_class)
    assert_same_bits(got, want)
    torch.compiler.reset()


@both_classes
def test_step_after_a_compiled_model(name):
    """Compiled forward and backward, eager step: the usual way, and all in Go."""

    def train(optimizer_class):
        torch.compiler.reset()
        model = make_model()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = optimizer_class(model.parameters(), **OPTIONS)
        for batch in make_batches(3):
            step(compiled, optimizer, batch)
        return record(model, optimizer)

    compare(train, name, num_steps=3)
    torch.compiler.reset()
