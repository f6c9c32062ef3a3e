"""torch.distributed on the CPU: DDP, ZeRO, FSDP2 and DCP in two processes that talk over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from . import processes
from .training import CLASSES, OPTIONS, assert_same_bits, both_classes, copied, loss_of, make_batches, make_model, only_go

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")

STEPS = 3


def both(train, name, *args):
    """In a worker: trains with both classes, all of ours in Go, and returns both results."""
    torch_class, go_class = CLASSES[name]
    want = train(torch_class, *args)
    with only_go() as step:
        got = train(go_class, *args)
    assert step.call_count > 0
    return {"got": got, "want": want}


def assert_ranks_agree(results):
    for rank, result in enumerate(results):
        assert_same_bits(result["got"], result["want"], f"rank {rank}")


def fit(model, optimizer, batches=None):
    """Each rank sees batches of its own."""
    for batch in batches or make_batches(STEPS, seed=100 + dist.get_rank()):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def local(value):
    """A nested state with the part of each tensor that this rank holds."""
    if isinstance(value, DTensor):
        return value.to_local().detach().clone()
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [local(item) for item in value]
    return copied(value)


def train_ddp(optimizer_class, as_views):
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=as_views)
    optimizer = optimizer_class(model.parameters(), **OPTIONS)
    fit(model, optimizer)
    return local({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()})


def ddp(name):
    """Gradients of their own, and gradients that are views into the buckets of the reduction."""
    return {key: [both(train_ddp, name, views)[key] for views in (False, True)] for key in ("got", "want")}


@both_classes
def test_ddp(name, tmp_path):
    assert_ranks_agree(processes.run(ddp, tmp_path / "group", name))
