"""The C between Python and Go: references, leaks and bounds on every way out, watched by AddressSanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from .processes import passes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GLUE = Path(__file__).parent / "glue"

SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def build(folder: Path, *flags: str) -> Path:
    """Compiles step.c and tensor.c with a stub for Go."""
    library = folder / "glue.so"
    sources = [ROOT / "pybind" / "step.c", ROOT / "pybind" / "tensor.c", GLUE / "stub.c"]
    command = ["gcc", "-g", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", *flags]
    result = subprocess.run([*command, "-o", library, *sources, "-lm"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return library


def runtime(name: str) -> str:
    """Where gcc has a sanitizer's library."""
    path = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if path == name:
        pytest.skip(f"gcc has no {name}")
    return str(Path(path).resolve())


@pytest.fixture(autouse=True)
def needs():
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch lacks DLPack's C exchange API, without which step.c is not used")
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi, by which allocations are made to fail")


SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT / "python")!r})
exec(compile(open({str(GLUE / "drive.py")!r}).read(), "drive.py", "exec"))
"""


def test_references_and_blocks(tmp_path):
    """No reference and no block is lost, by forty ways out and by each allocation that fails."""
    passes(SCRIPT, str(build(tmp_path)), prelude=False)


def test_under_address_sanitizer(tmp_path):
    """Neither a byte outside, nor one after it was freed, nor undefined behaviour; Python's own allocator is out of the way."""
    preload = f"{runtime('libasan.so')} {runtime('libubsan.so')}"
    env = {"LD_PRELOAD": preload, "PYTHONMALLOC": "malloc", "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:handle_segv=1"}
    passes(SCRIPT, str(build(tmp_path, *SANITIZE)), prelude=False, env=env, timeout=300)
