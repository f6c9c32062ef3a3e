"""CPUs that this machine is not, played by qemu-user: which backend runs on each, and with which bits. `make test-cpu`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
QEMU = shutil.which("qemu-x86_64")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QEMU is None, reason="there is no qemu-x86_64 (apt install qemu-user)"),
    pytest.mark.skipif(
        sysconfig.get_platform() != "linux-x86_64", reason="qemu-x86_64 would emulate every instruction of Python"
    ),
]

CPUS = {
    "Nehalem": ["generic"],  # SSE4.2
    "SandyBridge": ["generic"],  # AVX
    "Haswell,-avx2": ["generic"],
    "Haswell,-fma": ["generic"],
    "Haswell,-xsave": ["generic"],  # has the registers, but the operating system does not keep them
    "Haswell": ["generic", "avx2"],
    "Haswell,-bmi1,-bmi2,-movbe,-f16c,-abm": ["generic", "avx2"],  # with no more than the backend asks for
    "EPYC": ["generic", "avx2"],
}
"""QEMU's names, with the backends that must run there, and no others. QEMU has no AVX-512: see `make test-avx512`."""


def emulate(cpu: str, *command: str | Path, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [QEMU, "-cpu", cpu, *command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


# ---- Go


@pytest.fixture(scope="session")
def go_tests(tmp_path_factory) -> Path:
    """A folder with the tests of the Go packages as programs."""
    out = tmp_path_factory.mktemp("go")
    for package in ("kernel", "goadam"):
        build = ["go", "test", "-c", "-o", str(out), f"./{package}"]
        subprocess.run(build, cwd=ROOT, env={**os.environ, "CGO_ENABLED": "0"}, check=True)
    return out


@pytest.mark.parametrize("cpu", CPUS)
def test_kernels_on(go_tests, cpu):
    # QEMU 7.2 also reads the lanes that VMASKMOVPS leaves out, and faults there; the guard pages are for a true CPU.
    skip = ["-test.skip=TestStepStaysInside"] if "avx2" in CPUS[cpu] else []
    required = {"ROUNDPIPE_GO_REQUIRE_BACKENDS": ",".join(CPUS[cpu])}
    result = emulate(cpu, go_tests / "kernel.test", "-test.short", *skip, folder=ROOT / "kernel", **required)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == f"kernel: tests ran on {', '.join(CPUS[cpu])}"


@pytest.mark.parametrize("cpu", ["Nehalem", "Haswell"])
def test_plans_on(go_tests, cpu):
    tests = "-test.run=Backend|Refused|Plan|SameBits|Shared"
    result = emulate(cpu, go_tests / "goadam.test", "-test.short", "-test.v", tests, folder=ROOT / "goadam")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "--- PASS: TestUnavailableBackendIsRefused" in result.stdout
    assert "--- PASS: TestStepHasTheSameBitsForAnyThreads" in result.stdout


# ---- Python

CHILD = """
import json, sys, warnings
import torch, roundpipe_go
warnings.simplefilter("error", roundpipe_go.FallbackWarning)
roundpipe_go.set_num_threads(2)
refused = {}
for name in ("generic", "avx2", "avx512"):
    try:
        roundpipe_go.set_backend(name)
    except RuntimeError as error:
        refused[name] = str(error)
roundpipe_go.set_backend(None)

def trained(cls, dtype, options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(n, dtype=dtype, generator=generator).requires_grad_() for n in (1, 37, 1000)]
    optimizer = cls(params, **options)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, dtype=dtype, generator=generator)
        optimizer.step()
    return [t for p in params for t in (p.detach(), *optimizer.state[p].values())]

different = []
for name in ("Adam", "AdamW"):
    for dtype in (torch.float32, torch.float64):
        for amsgrad in (False, True):
            options = {"amsgrad": amsgrad, "weight_decay": 0.1}
            ours, theirs = (trained(getattr(m, name), dtype, options) for m in (roundpipe_go, torch.optim))
            if not all(torch.equal(a, b) for a, b in zip(ours, theirs)):
                different.append(f"{name} {dtype} {options}")
json.dump({"info": roundpipe_go.build_info(), "refused": refused, "different": different}, sys.stdout)
"""


@pytest.mark.parametrize("cpu", ["Nehalem", "Haswell,-fma", "Haswell"])
def test_steps_on(cpu):
    result = emulate(cpu, sys.executable, "-c", CHILD)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    backends = CPUS[cpu]
    assert found["info"]["backends"] == backends
    assert found["info"]["backend"] == backends[-1]
    # torch has no kernels with FMA but those for AVX2.
    assert found["info"]["arithmetic"] == ("fma" if "avx2" in backends else "plain")
    assert found["different"] == []
    assert found["refused"] == {
        name: f"roundpipe_go: backend is '{name}', which this CPU cannot run; it has {', '.join(backends)}"
        for name in ("avx2", "avx512")
        if name not in backends
    }


def test_forced_backend_is_refused_by_the_command():
    environment = {"ROUNDPIPE_GO_BACKEND": "avx2"}
    result = emulate("Nehalem", sys.executable, "-m", "roundpipe_go", "vectorization", **environment)
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout == ""
    sentence = "roundpipe_go: ROUNDPIPE_GO_BACKEND is 'avx2', which this CPU cannot run; it has generic"
    assert sentence in result.stderr.splitlines()


def test_vectorization_says_no_without_avx2():
    result = emulate("Nehalem", sys.executable, "-m", "roundpipe_go", "vectorization")
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.startswith("no: this machine runs the backend generic, portable Go")
