"""Lightning: it wraps the optimizer in a subclass made on the fly and steps it with a closure."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch

from roundpipe_go import _fallback

from .training import CLASSES, OPTIONS, assert_same_bits, both_classes, compare, engine, loss_of, make_batches, make_model, record

lightning = engine("lightning")

STEPS = 4


class Module(lightning.LightningModule):
    def __init__(self, optimizer_class, manual=False):
        super().__init__()
        self.model = make_model()
        self.optimizer_class = optimizer_class
        self.automatic_optimization = not manual

    def configure_optimizers(self):
        optimizer = self.optimizer_class(self.parameters(), **OPTIONS)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch, index):
        loss = loss_of(self.model, batch)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            self.lr_schedulers().step()
        return loss


def trainer(directory, **options):
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        **{"max_steps": STEPS, **options},
    )


def loader():
    inputs, targets = (torch.cat(tensors) for tensors in zip(*make_batches(STEPS)))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=12)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        yield


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@both_classes
def test_fit(name, manual, precision, tmp_path):
    def train(optimizer_class):
        module = Module(optimizer_class, manual)
        clip = {} if manual else {"gradient_clip_val": 0.5}
        fitted = trainer(tmp_path, precision=precision, **clip)
        fitted.fit(module, loader())
        assert type(fitted.optimizers[0]) is optimizer_class
        return record(module, *fitted.optimizers)

    compare(train, name, num_steps=STEPS)


@both_classes
def test_parameters_in_bf16_are_left_to_torch(name, tmp_path):
    def train(optimizer_class):
        module = Module(optimizer_class)
        fitted = trainer(tmp_path, precision="bf16-true")
        fitted.fit(module, loader())
        return record(module, *fitted.optimizers)

    torch_class, go_class = CLASSES[name]
    want = train(torch_class)
    with mock.patch.object(_fallback, "warn") as warn:
        got = train(go_class)
    assert warn.call_count == STEPS
    assert_same_bits(got, want)


@both_classes
def test_checkpoint_goes_on(name, tmp_path):
    def train(optimizer_class):
        path = tmp_path / f"{optimizer_class.__module__}.ckpt"
        first = trainer(tmp_path, max_steps=2)
        first.fit(Module(optimizer_class), loader())
        first.save_checkpoint(path)
        module, second = Module(optimizer_class), trainer(tmp_path)
        second.fit(module, loader(), ckpt_path=path)
        assert second.global_step == STEPS
        return record(module, *second.optimizers)

    compare(train, name, num_steps=STEPS)


@both_classes
def test_fabric(name):
    def train(optimizer_class):
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        model = make_model()
        model, optimizer = fabric.setup(model, optimizer_class(model.parameters(), **OPTIONS))
        assert isinstance(optimizer, optimizer_class)
        for batch in make_batches(STEPS):
            optimizer.zero_grad()
            fabric.backward(loss_of(model, batch))
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
        return record(model, optimizer)

    compare(train, name, num_steps=STEPS)
