"""DTensor parameters (FSDP2, tensor parallelism): Adam is elementwise, so each rank updates its own shard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def local_shards(tensors: Sequence[Any]) -> list[Tensor] | None:
    """Returns this rank's shards, which share memory with the given tensors; nothing is copied or communicated.

    Args:
        tensors: parameter, gradient and state of one parameter.

    Returns:
        Plain tensors in the same order; None unless all are DTensors that one device mesh holds in the same way, sharded
        or replicated. A gradient whose reduction is still under way is waited for.
    """
    module = sys.modules.get("torch.distributed.tensor")  # whoever has a DTensor has imported it
    if module is None or not all(isinstance(tensor, module.DTensor) for tensor in tensors):
        return None
    mesh, placements = tensors[0].device_mesh, tensors[0].placements
    if any(tensor.device_mesh != mesh or tensor.placements != placements for tensor in tensors):
        return None
    if any(placement.is_partial() for placement in placements):
        return None
    shards = [tensor.to_local() for tensor in tensors]
    return [shard.trigger_wait() if hasattr(shard, "trigger_wait") else shard for shard in shards]
