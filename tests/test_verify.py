"""``python -m roundpipe_go`` and its comparison on the user's machine."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import roundpipe_go
from roundpipe_go import __main__, _binding, _verify


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


def test_report_shows_the_switches(monkeypatch, switch, capsys):
    switch("NUM_THREADS", "3")
    _, text = run(monkeypatch, capsys)
    assert "ROUNDPIPE_GO_NUM_THREADS=3" in text


def test_report_survives_a_wrong_setting(monkeypatch, switch, capsys):
    switch("NUM_THREADS", "abc")
    switch("BACKEND", "sse")
    switch("THREADS", "3")
    status, text = run(monkeypatch, capsys)
    assert status == 0
    assert "error: roundpipe_go: ROUNDPIPE_GO_NUM_THREADS is 'abc'" in text
    assert "error: roundpipe_go: ROUNDPIPE_GO_BACKEND is 'sse'" in text
    assert "ROUNDPIPE_GO_THREADS is set, but there is no such switch" in text
    assert torch.__version__ in text
    monkeypatch.setattr(sys, "argv", ["roundpipe_go", "verify"])
    assert __main__.main() == 1
    assert "ROUNDPIPE_GO_NUM_THREADS is 'abc'" in capsys.readouterr().err


def test_verify_does_not_compare_the_other_square_root(monkeypatch, switch, capsys):
    switch("SQUARE_ROOT", "ieee")
    monkeypatch.setattr(sys, "argv", ["roundpipe_go", "verify"])
    assert __main__.main() == 1
    assert "was asked for" in capsys.readouterr().err


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
    native_step, odd = _binding.step, []

    def one_bit_off(calls):
        result = native_step(calls)
        for param in odd:
            param.detach().view(torch.int32)[3, 3] ^= 1
        return result

    class Adam(roundpipe_go.Adam):
        def __init__(self, params, **options):
            super().__init__(params, **options)
            odd[:] = [param for param in self.param_groups[0]["params"] if param.shape == (31, 7)]

    monkeypatch.setattr(_binding, "step", one_bit_off)
    monkeypatch.setattr(_binding, "plain_step", lambda: None)
    monkeypatch.setattr(_verify, "Adam", Adam)
    monkeypatch.setattr(_verify, "_KINDS", _verify._KINDS[:2])
    status, text = run(monkeypatch, capsys, "verify")
    assert status == 1
    assert "DIFFERENT" in text
    assert "shape (31, 7), param" in text
    assert "please report" in text
