"""Every learning-rate scheduler of torch: they wrap ``step`` on the instance and rewrite lr and betas between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from .training import OPTIONS, both_classes, compare, loss_of, make_batches, make_model, record

STEPS = 7

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=0.3, total_iters=3),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=4, eta_min=1e-5),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-1, step_size_up=2, step_size_down=3),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.7),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.3),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.8),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, total_iters=5, power=2.0),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)],
        milestones=[3],
    ),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    "SWALR": lambda optimizer: SWALR(optimizer, swa_lr=0.05, anneal_epochs=3),
}
"""How to make one on an optimizer, by class; SWALR lives in another module."""


def test_all_schedulers_of_torch_are_here():
    base = lr_scheduler.LRScheduler
    of_torch = {
        key
        for key, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and not key.startswith("_")
    }
    assert of_torch | {"SWALR"} == set(SCHEDULERS)


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float_lr", "tensor_lr"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@both_classes
def test_scheduler(name, scheduler, tensor_lr):
    def train(optimizer_class):
        model = make_model()
        lr = torch.tensor(OPTIONS["lr"]) if tensor_lr else OPTIONS["lr"]
        optimizer = optimizer_class(model.parameters(), **{**OPTIONS, "lr": lr})
        schedule = SCHEDULERS[scheduler](optimizer)
        rates = []
        for batch in make_batches(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            schedule.step(*([loss.item()] if scheduler == "ReduceLROnPlateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        assert len(set(rates)) > 1, f"the schedule never changed the rate: {rates}"
        return record(model, optimizer)

    compare(train, name, num_steps=STEPS)


@both_classes
def test_scheduler_resumes(name):
    def train(optimizer_class):
        model = make_model()

        def make():
            optimizer = optimizer_class(model.parameters(), **OPTIONS)
            return optimizer, SCHEDULERS["OneCycleLR"](optimizer)

        optimizer, schedule = make()
        for i, batch in enumerate(make_batches(STEPS)):
            if i == 3:
                saved = optimizer.state_dict(), schedule.state_dict()
                optimizer, schedule = make()
                optimizer.load_state_dict(saved[0])
                schedule.load_state_dict(saved[1])
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            schedule.step()
        return record(model, optimizer)

    compare(train, name, num_steps=STEPS)
