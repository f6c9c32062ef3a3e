"""Pages of 2 MiB under the moments, and under what the user asks for."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import roundpipe_go
from oracle import Twins
from roundpipe_go import _memory

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
OFFERED = ENABLED.exists() and "[never]" not in ENABLED.read_text()
LARGE = 3 * _memory.SMALLEST // 4
"""Elements of float32: 12 MiB, in which at least five whole pages lie."""

needs_pages = pytest.mark.skipif(not OFFERED, reason="Linux offers no pages of 2 MiB to programs here")


def on_huge_pages(tensor: torch.Tensor) -> int:
    """Bytes of the mapping in which a tensor's middle lies that are on huge pages now."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, _, end = first.partition("-")
            inside = int(begin, 16) <= middle < int(end, 16)
        elif inside and first == "AnonHugePages:":
            return int(line.split()[1]) << 10
    raise AssertionError("the tensor is in no mapping")


def large_twins() -> Twins:
    return Twins(lambda: [torch.linspace(-1, 1, LARGE).requires_grad_()], lr=0.1)


@needs_pages
def test_moments_are_on_huge_pages():
    twins = large_twins()
    twins.train(2)
    twins.assert_equal()
    (state,) = twins.ours.state.values()
    assert on_huge_pages(state["exp_avg"]) > 0
    assert on_huge_pages(state["exp_avg_sq"]) > 0


@needs_pages
def test_loaded_and_copied_moments_are_too():
    twins = large_twins()
    twins.train(1)
    saved = copy.deepcopy(twins.torch.state_dict())
    twins.ours.load_state_dict(saved)
    for optimizer in (twins.ours, copy.deepcopy(twins.ours)):
        (state,) = optimizer.state.values()
        assert on_huge_pages(state["exp_avg"]) > 0
    twins.train(1)
    twins.assert_equal()


@needs_pages
def test_values_stay_and_bytes_are_counted():
    tensor = torch.linspace(-1, 1, LARGE)
    want, address = tensor.clone(), tensor.data_ptr()
    assert 4 * LARGE - 2 * _memory._PAGE < roundpipe_go.use_huge_pages([tensor]) <= 4 * LARGE
    assert on_huge_pages(tensor) > 0
    assert torch.equal(tensor, want)
    assert tensor.data_ptr() == address


def test_what_is_passed_over():
    sparse = torch.ones(3).to_sparse()
    small = torch.ones(_memory.SMALLEST // 4 - 1)
    assert roundpipe_go.use_huge_pages([sparse, small, torch.ones(LARGE, device="meta")]) == 0


@pytest.mark.parametrize("tensors", [torch.ones(3), None, 3, torch.nn.Linear(1, 1)], ids=lambda value: type(value).__name__)
def test_no_tensors(tensors):
    with pytest.raises(TypeError, match=r"^roundpipe_go: tensors is a .*, want several, such as model.parameters\(\)$"):
        roundpipe_go.use_huge_pages(tensors)


def test_no_tensor():
    with pytest.raises(TypeError, match=r"^roundpipe_go: tensors has a str, want tensors, such as model.parameters\(\)$"):
        roundpipe_go.use_huge_pages(["weight"])


def test_a_linux_without_them(monkeypatch):
    """madvise refuses; nothing else happens."""
    monkeypatch.setattr(_memory, "_madvise", lambda: lambda *_: -1)
    assert roundpipe_go.use_huge_pages([torch.ones(LARGE)]) == 0
    twins = large_twins()
    twins.train(1)
    twins.assert_equal()
