"""Hugging Face Accelerate: prepare, accumulate, clip, save and load."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from .training import (
    OPTIONS,
    assert_equal_on_all_ranks,
    both_classes,
    compare,
    each_class,
    engine,
    loss_of,
    make_batches,
    make_model,
    record,
)

accelerate = engine("accelerate")

STEPS = 4


def prepared(optimizer_class, **options):
    """An accelerator, and what it has wrapped."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # one a process otherwise
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = make_model()
    optimizer = optimizer_class(model.parameters(), **OPTIONS)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def fit(accelerator, model, optimizer, schedule, batches):
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@both_classes
def test_prepare(name, mixed_precision):
    def train(optimizer_class):
        accelerator, model, optimizer, schedule = prepared(
            optimizer_class, mixed_precision=mixed_precision, gradient_accumulation_steps=2
        )
        fit(accelerator, model, optimizer, schedule, make_batches(2 * STEPS))
        assert type(optimizer.optimizer) is optimizer_class
        return record(accelerator.unwrap_model(model), optimizer)

    compare(train, name, num_steps=STEPS)


@both_classes
def test_save_and_load_state(name, tmp_path):
    def train(optimizer_class):
        directory = str(tmp_path / optimizer_class.__module__)
        batches = make_batches(STEPS)
        accelerator, *first = prepared(optimizer_class)
        fit(accelerator, *first, batches[:2])
        accelerator.save_state(directory)
        accelerator, model, optimizer, schedule = prepared(optimizer_class)
        accelerator.load_state(directory)
        fit(accelerator, model, optimizer, schedule, batches[2:])
        return record(model, optimizer)

    compare(train, name, num_steps=STEPS)


def in_a_group(optimizer_class):
    accelerator, model, optimizer, schedule = prepared(optimizer_class, gradient_accumulation_steps=2)
    assert accelerator.num_processes == dist.get_world_size()
    fit(accelerator, model, optimizer, schedule, make_batches(2 * STEPS, seed=100 + accelerator.process_index))
    return record(accelerator.unwrap_model(model), optimizer)


def test_two_processes(group):
    assert_equal_on_all_ranks(group.run(each_class, in_a_group))
