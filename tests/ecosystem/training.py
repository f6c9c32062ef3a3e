"""The training that the tests here run twice: with torch's optimizer and with ours."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import roundpipe_go
from native import native_steps
from roundpipe_go import _fallback

CLASSES = {
    "Adam": (torch.optim.Adam, roundpipe_go.Adam),
    "AdamW": (torch.optim.AdamW, roundpipe_go.AdamW),
}
"""torch's class and ours, by the name they share."""

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}

both_classes = pytest.mark.parametrize("name", CLASSES)


def engine(name: str) -> ModuleType:
    """Imports a package that a module of tests is about, or skips that module where it is not installed.

    With ROUNDPIPE_GO_REQUIRE_ENGINES=1 a missing package is an error, so that a green run cannot mean "skipped".
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name or os.environ.get("ROUNDPIPE_GO_REQUIRE_ENGINES") == "1":
            raise
        pytest.skip(f"{name} is not installed: pip install 'roundpipe-go[engines]'", allow_module_level=True)


def make_model() -> nn.Module:
    """Small and odd in size: lanes and tails, a tensor of 5 elements, and one of 1, of which a second rank has none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 33), nn.LayerNorm(33), nn.PReLU(), nn.Linear(33, 5))


def make_batches(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(12, 9, generator=generator), torch.randn(12, 5, generator=generator)) for _ in range(count)]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def copied(value: Any) -> Any:
    """A nested value whose tensors later steps do not change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(item) for item in value]
    return value


def record(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """All that training has made: weights, moments, counters, options."""
    return copied({"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]})


def assert_same_bits(got: Any, want: Any, where: str = "") -> None:
    """Compares nested values, floats and tensors by their bits; a failure names the first difference in hex."""
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor), f"{where}: got {type(got)}, want a tensor"
        assert (got.dtype, got.shape) == (want.dtype, want.shape), where
        got, want = (tensor.detach().contiguous().reshape(-1) for tensor in (got, want))
        for i in (got.view(torch.uint8) != want.view(torch.uint8)).nonzero().flatten().tolist():
            i //= want.element_size()
            raise AssertionError(f"{where}[{i}]: got {float(got[i]).hex()}, want {float(want[i]).hex()}")
    elif isinstance(want, dict):
        assert list(got) == list(want), where
        for key in want:
            assert_same_bits(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), where
        for i, (got_item, want_item) in enumerate(zip(got, want)):
            assert_same_bits(got_item, want_item, f"{where}.{i}")
    elif isinstance(want, float):
        assert got.hex() == want.hex(), where
    else:
        assert got == want, where


@contextlib.contextmanager
def only_go() -> Iterator[list[torch.dtype]]:
    """Fails as soon as torch computes part of a step, and collects the dtypes of the native steps."""

    def refuse(reason: str, params: Sequence[Tensor]) -> None:
        raise AssertionError(f"torch computes part of a step: {reason}")

    with mock.patch.object(_fallback, "warn", refuse), native_steps() as dtypes:
        yield dtypes


def compare(train: Callable[[type[torch.optim.Optimizer]], Any], name: str, *, num_steps: int) -> None:
    """Trains with both classes of a name and compares what ``train`` returns.

    Args:
        train: takes the class; everything else in it must be reproducible.
        name: key of ``CLASSES``.
        num_steps: how often our class must have called Go, so that the comparison is not one of torch with torch.
    """
    torch_class, go_class = CLASSES[name]
    want = train(torch_class)
    with only_go() as dtypes:
        got = train(go_class)
    assert len(dtypes) == num_steps, "steps in Go"
    assert_same_bits(got, want)


def each_class(train: Callable[..., Any], *args: Any) -> dict[str, dict[str, Any]]:
    """Trains with every class of torch and with ours, all in Go, and leaves the comparison to the parent process.

    Args:
        train: takes the class and ``args``.

    Returns:
        By name of the class: what ours made, under "got", and what torch's made, under "want".
    """
    results = {}
    for name, (torch_class, go_class) in CLASSES.items():
        want = train(torch_class, *args)
        with only_go() as dtypes:
            got = train(go_class, *args)
        assert len(dtypes) > 0
        results[name] = {"got": got, "want": want}
    return results


def assert_equal_on_all_ranks(ranks: list[dict[str, dict[str, Any]]]) -> None:
    """Compares what ``each_class`` has returned on each rank."""
    assert ranks
    for rank, results in enumerate(ranks):
        assert set(results) == set(CLASSES)
        for name, result in results.items():
            assert_same_bits(result["got"], result["want"], f"{name}, rank {rank}: ")
