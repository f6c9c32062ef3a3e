"""``python -m roundpipe_go`` and its comparison on the user's machine."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import roundpipe_go
from roundpipe_go import __main__, _step, _verify


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["roundpipe_go", *arguments])
    status = __main__.main()
    return status, capsys.readouterr().out


def test_report_names_what_a_bug_report_needs(monkeypatch, capsys):
    status, text = run(monkeypatch, capsys)
    assert status == 0
    info = roundpipe_go.build_info()
    for value in (info["torch"], info["go"], info["backend"], info["arithmetic"], info["square_root"], info["why"]):
        assert str(value) in text
    status, text = run(monkeypatch, capsys, "--json")
    assert status == 0
    assert json.loads(text) == info


def test_report_shows_the_switches(monkeypatch, capsys):
    monkeypatch.setenv("ROUNDPIPE_GO_NUM_THREADS", "3")
    _, text = run(monkeypatch, capsys)
    assert "ROUNDPIPE_GO_NUM_THREADS=3" in text


@pytest.mark.filterwarnings("ignore::roundpipe_go.FallbackWarning")
def test_verify_passes_and_tells_who_computed(monkeypatch, capsys):
    status, text = run(monkeypatch, capsys, "verify", "--json")
    result = json.loads(text)
    assert status == 0
    assert result["equal"] is True
    served = {row["name"]: row["served"] for row in result["rows"]}
    assert served["float32"] == served["float32, decoupled decay"] == served["complex64"] == served["float64"] == "kernel"
    assert served["bfloat16"] == served["float32, fused=True"] == "torch"
    assert all(row["runs"] == 8 and not row["different"] for row in result["rows"])
    assert all(row["reason"] for row in result["rows"] if row["served"] == "torch")


def test_verify_finds_a_wrong_bit(monkeypatch, capsys):
    """A kernel that is off by one bit in one element of one parameter."""
    run_step = _step.Step.run

    def one_bit_off(self):
        run_step(self)
        for lists, _ in self._added:
            for param in lists[0]:
                if param.shape == (31, 7):
                    param.detach().view(torch.int32)[3, 3] ^= 1

    monkeypatch.setattr(_step.Step, "run", one_bit_off)
    monkeypatch.setattr(_verify, "_KINDS", _verify._KINDS[:2])
    status, text = run(monkeypatch, capsys, "verify")
    assert status == 1
    assert "DIFFERENT" in text
    assert "shape (31, 7), param" in text
    assert "please report" in text
