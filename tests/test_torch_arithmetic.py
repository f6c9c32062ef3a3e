"""Finding out what torch computes: a false square root is noticed in a single value, and other arithmetics are followed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import roundpipe_go
from cases import VARIANTS
from oracle import Twins, ieee_sqrt
from roundpipe_go import _torch_arithmetic
from roundpipe_go._torch_arithmetic import torch_arithmetic

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def forgotten():
    """Every test finds out anew, and leaves nothing that it found out under a false torch."""
    _torch_arithmetic._detect.cache_clear()
    yield
    _torch_arithmetic._detect.cache_clear()


def wrong_at(pattern: int, sqrt=torch.sqrt):
    """A square root that is one ulp off for the float32 of one bit pattern."""

    def false_sqrt(x: Tensor, out: Tensor | None = None) -> Tensor:
        y = sqrt(x, out=out)
        at = x.view(torch.int32) == pattern
        return torch.where(at, (y.view(torch.int32) + 1).view(torch.float32), y, out=out)

    return false_sqrt


def test_choice_is_the_first_that_equals_torch():
    """Asked again here: the chosen one equals, on values that the probe has not seen."""
    arithmetic = torch_arithmetic()
    capability = torch.backends.cpu.get_cpu_capability()
    assert arithmetic.arithmetic == ("plain" if capability in ("DEFAULT", "NO AVX") else "fma")
    assert arithmetic.square_root is not None, "no square root of the kernels is torch's: everything would be left to torch"
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 1 << 31, (1 << 20,), generator=generator).int().view(torch.float32)
    assert _torch_arithmetic._sqrt_equals(x, arithmetic.square_root)
    assert capability in arithmetic.why


def test_correctly_rounded_torch_gets_ieee(monkeypatch):
    monkeypatch.setattr(torch, "sqrt", ieee_sqrt)
    assert torch_arithmetic().square_root == "ieee"


@pytest.mark.parametrize("value", [1.0, 1.0 + 2**-23, 1.7, 2.0, 3.999999], ids=str)
def test_one_wrong_value_refuses_ieee(monkeypatch, value):
    """Of all 2**24 in [1, 4), for which the formulas stand."""
    pattern = int(torch.tensor(value).view(torch.int32))
    monkeypatch.setattr(torch, "sqrt", wrong_at(pattern, ieee_sqrt))
    arithmetic = torch_arithmetic()
    assert arithmetic.square_root is None
    assert "no square root" in arithmetic.why


@pytest.mark.parametrize("value", [1.0 + 2**-23, 1.7, 3.999999], ids=str)
def test_one_wrong_value_refuses_every_formula(monkeypatch, value):
    """Of whatever torch computes here. The library function alone may pass: it is torch's own, and the probe is a sample."""
    pattern = int(torch.tensor(value).view(torch.int32))
    monkeypatch.setattr(torch, "sqrt", wrong_at(pattern))
    assert torch_arithmetic().square_root in (None, "library")


@pytest.mark.parametrize("value", [0.0, 1.0, 2.0**-149, 2.0**-126, 3.4028234663852886e38, float("inf")], ids=str)
@pytest.mark.parametrize("sqrt", [torch.sqrt, ieee_sqrt], ids=["torch", "ieee"])
def test_wrong_edges_refuse_all(monkeypatch, sqrt, value):
    """The library function too."""
    pattern = int(torch.tensor(value).view(torch.int32))
    monkeypatch.setattr(torch, "sqrt", wrong_at(pattern, sqrt))
    assert torch_arithmetic().square_root is None


def test_number_for_a_negative_refuses_all(monkeypatch):
    sqrt = torch.sqrt
    monkeypatch.setattr(torch, "sqrt", lambda x, out=None: sqrt(x.abs(), out=out))
    assert torch_arithmetic().square_root is None


def test_without_a_square_root_torch_computes(monkeypatch):
    monkeypatch.setattr(torch, "sqrt", lambda x, out=None: x if out is None else out.copy_(x))
    twins = Twins(lambda: [torch.linspace(-1, 1, 50).requires_grad_()], amsgrad=True)
    with pytest.warns(roundpipe_go.FallbackWarning, match="no square root of the kernels equals torch.sqrt") as caught:
        twins.train(3)
    assert len(caught) == 1


def test_finding_out_leaves_the_mode_alone():
    """Flushing of denormals is switched off for the probe, and back on."""
    assert torch.set_flush_denormal(True)
    try:
        torch_arithmetic()
        assert torch.tensor([2.0**-126]).mul(0.5).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    want = torch_arithmetic()
    _torch_arithmetic._detect.cache_clear()
    assert torch_arithmetic() == want


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant[0])
def test_ieee_is_torchs_formula_with_the_correct_root(variant, backend, monkeypatch):
    """torch's own optimizer with its square root replaced, on all that has square roots: random bit patterns too."""
    roundpipe_go.set_square_root("ieee")
    _, ours, decay, flags = variant
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(5000, generator=generator)
    twins = Twins(lambda: [values.clone().requires_grad_()], ours, **decay, **flags)
    monkeypatch.setattr(torch.Tensor, "sqrt", ieee_sqrt)
    for _ in range(3):
        twins.step([torch.randint(-(1 << 31), 1 << 31, (5000,), generator=generator).int().view(torch.float32)])
        twins.step([torch.randn(5000, generator=generator)])


def test_ieee_says_so():
    roundpipe_go.set_square_root("ieee")
    arithmetic = torch_arithmetic()
    assert arithmetic.square_root == "ieee"
    assert "asked for" in arithmetic.why


PARITY = ["test_parity.py", "test_float64.py", "-q", "-k", "test_any_bits or test_preset_step or (test_special_values and 0.999)"]

CHILD = """
import json, sys
import torch
torch.set_num_threads(1)
torch.set_flush_denormal(sys.argv[1] == "flush")
import pytest, roundpipe_go
print(json.dumps(roundpipe_go.build_info()))
sys.stdout.flush()
sys.exit(pytest.main(sys.argv[2:]))
"""


def parity_in_a_child(mode: str, **environment: str) -> dict:
    """Runs a part of the parity tests under another mode of the process; returns the child's build_info."""
    run = subprocess.run(
        [sys.executable, "-c", CHILD, mode, "-p", "no:cacheprovider", *PARITY],
        cwd=TESTS,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
    assert " failed" not in run.stdout
    return json.loads(run.stdout.splitlines()[0])


def test_parity_with_the_plain_arithmetic():
    """torch without vector extensions rounds products and sums apart."""
    info = parity_in_a_child("no_flush", ATEN_CPU_CAPABILITY="default")
    assert info["torch_cpu_capability"] in ("DEFAULT", "NO AVX")
    assert info["arithmetic"] == "plain"


def test_parity_with_avx2_torch():
    info = parity_in_a_child("no_flush", ATEN_CPU_CAPABILITY="avx2")
    assert info["torch_cpu_capability"] == "AVX2"
    assert info["arithmetic"] == "fma"


def test_parity_while_denormals_are_flushed():
    """``torch.set_flush_denormal(True)`` holds in our threads as it does in torch's."""
    parity_in_a_child("flush")
