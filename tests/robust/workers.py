"""What processes of other start methods import: a data set whose items come from training, and a rank of torchrun."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.utils.data import Dataset

import roundpipe_go
from oracle import Twins


def weights(seed: int) -> Tensor:
    """What some training comes to, whoever computes it."""
    param = torch.linspace(-1, 1, 1000).requires_grad_()
    optimizer = roundpipe_go.AdamW([param], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", roundpipe_go.FallbackWarning)
        for _ in range(5):
            param.grad = param.detach().sin() * seed
            optimizer.step()
    return param.detach()


class Stepping(Dataset):
    """Items are the index, what ``weights`` gives for it, and whether torch computed that."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, Tensor, bool]:
        return index, weights(index), roundpipe_go.build_info()["forked"]


if __name__ == "__main__":
    warnings.simplefilter("error", roundpipe_go.FallbackWarning)
    twins = Twins(lambda: [torch.linspace(-1, 1, 700_001).requires_grad_()])
    twins.train(3)
    threads = roundpipe_go.build_info()["threads"]
    assert threads["roundpipe_go"] == threads["torch"], threads
    print(f"rank done with {threads['roundpipe_go']} thread", flush=True)
