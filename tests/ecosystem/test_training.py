"""The comparison itself: it must see every bit, and must not pass on what has not run."""

from __future__ import annotations

import pytest
import torch

import roundpipe_go

from .training import CLASSES, assert_same_bits, compare, engine, only_go


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0]).double()),
        (torch.ones(2, 3), torch.ones(3, 2)),
        (1.0, 1.0 + 2**-52),
        ([1, 2], [1]),
        ({"step": 1}, {"step": 1, "exp_avg": 2}),
        ({"lr": [torch.tensor(1.0)]}, {"lr": [torch.tensor(1.0 + 2**-23)]}),
        (None, torch.ones(1)),
    ],
)
def test_difference_is_seen(got, want):
    assert_same_bits(want, want)
    with pytest.raises(AssertionError):
        assert_same_bits(got, want)


def test_same_nan_is_no_difference():
    assert_same_bits(torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf]))


def test_failure_names_place_and_bits():
    with pytest.raises(AssertionError, match=r"^\.state\.0\[1\]: got 0x1\.0+p\+1, want 0x1\.8000000000000p\+0$"):
        assert_same_bits({"state": [torch.tensor([1.0, 2.0])]}, {"state": [torch.tensor([1.0, 1.5])]})


def train(optimizer_class, **options):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer_class([param], **options).step()
    return param


def test_step_through_torch_is_refused():
    with pytest.raises(AssertionError, match="torch computes part of a step: fused"), only_go():
        train(roundpipe_go.AdamW, fused=True)


def test_native_steps_are_counted():
    compare(train, "AdamW", num_steps=1)
    with pytest.raises(AssertionError, match="steps in Go"):
        compare(train, "AdamW", num_steps=2)


def test_wrong_bits_are_not_equal(monkeypatch):
    monkeypatch.setitem(CLASSES, "AdamW", (torch.optim.Adam, roundpipe_go.AdamW))
    with pytest.raises(AssertionError, match="want 0x"):
        compare(train, "AdamW", num_steps=1)


def test_missing_engine(monkeypatch):
    monkeypatch.delenv("ROUNDPIPE_GO_REQUIRE_ENGINES", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no_such_engine is not installed"):
        engine("no_such_engine")
    monkeypatch.setenv("ROUNDPIPE_GO_REQUIRE_ENGINES", "1")
    with pytest.raises(ModuleNotFoundError):
        engine("no_such_engine")
