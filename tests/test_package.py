"""What is installed, and how setup.py builds it: the extension's surface, its loader entries, refusals, sdist and wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import roundpipe_go
from roundpipe_go import _native

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(roundpipe_go.__file__).parent
EXTENSION = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"

KEYWORDS = {
    "ABI": [],
    "Backends": [],
    "BuildInfo": [],
    "SetTeam": ["parallel", "threadNum", "maxThreads"],
    "SetLibrarySquareRoot": ["dtype", "address", "setThreads"],
    "Sqrt": ["y", "x", "numel", "dtype", "backend", "squareRoot"],
    "Step": ["calls", "numCalls"],
}
"""The functions of _native with their keywords. gopy leaves out in silence what it cannot wrap."""


def python(code: str, interpreter: str = sys.executable) -> str:
    """Runs code in a process of its own and returns what it printed."""
    result = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout


def dynamic_strings(library: Path, *tags: int) -> list[str]:
    """Reads the names that the dynamic section of a 64-bit ELF file gives for the tags (1 NEEDED, 15 RPATH, 29 RUNPATH)."""
    image = library.read_bytes()
    assert image[:6] == b"\x7fELF\x02\x01", f"{library} is no little-endian 64-bit ELF file"
    (table,), (entry_size, count) = struct.unpack_from("<Q", image, 32), struct.unpack_from("<HH", image, 54)
    # Of each segment: type, offset in the file, address, size in the file.
    segments = [struct.unpack_from("<I4xQQ8xQ", image, table + i * entry_size) for i in range(count)]

    def offset(address: int) -> int:
        return next(o + address - a for kind, o, a, size in segments if kind == 1 and a <= address < a + size)

    begin, nbytes = next((o, size) for kind, o, _, size in segments if kind == 2)
    entries = list(struct.iter_unpack("<QQ", image[begin : begin + nbytes]))
    strings = offset(next(value for tag, value in entries if tag == 5))
    return [image[strings + value :].split(b"\0", 1)[0].decode() for tag, value in entries if tag in tags]


# ---- the installed package


def test_extension_needs_libc_only():
    assert dynamic_strings(PACKAGE / EXTENSION, 1) == ["libm.so.6", "libc.so.6"]


def test_extension_has_no_search_path():
    assert dynamic_strings(PACKAGE / EXTENSION, 15, 29) == []


def test_extension_exports_the_functions_of_pybind():
    assert sorted(name for name in dir(_native) if not name.startswith("__")) == sorted(KEYWORDS)


@pytest.mark.parametrize("name", KEYWORDS)
def test_extension_function_has_keywords(name):
    signature = getattr(_native, name).__doc__.splitlines()[0]
    assert signature == f"{name}({', '.join(KEYWORDS[name])})"


def test_extension_refuses_what_is_no_int64():
    with pytest.raises(TypeError):
        _native.SetLibrarySquareRoot(0, "0", 0)
    with pytest.raises(OverflowError):
        _native.SetLibrarySquareRoot(0, 2**63, 0)


def test_package_has_type_marker_and_no_generated_python():
    names = {path.name for path in PACKAGE.iterdir()}
    assert "py.typed" in names
    assert not names & {"build.py", "go.py", "native.py", "pybind.py"}


def test_metadata_requires_torch_only():
    required = [line for line in importlib.metadata.requires("roundpipe-go") if "extra ==" not in line]
    assert required == ["torch>=2.6"]


def test_metadata_names_version_and_license():
    metadata = importlib.metadata.metadata("roundpipe-go")
    assert metadata["Version"] == roundpipe_go.__version__
    assert metadata["License-Expression"] == "Apache-2.0"


def test_import_leaves_floating_point_control_alone():
    # fegetenv writes the control words, MXCSR last on x86-64 and FPCR first on aarch64; flags of past operations are no control.
    word, mask = (7, 0xFFC0) if sysconfig.get_platform() == "linux-x86_64" else (0, 0xFFFFFFFF)
    output = python(f"""
import ctypes, torch
libm = ctypes.CDLL("libm.so.6")
def control():
    environment = (ctypes.c_uint32 * 16)()
    assert libm.fegetenv(environment) == 0
    return environment[{word}] & {mask}
before = control()
from roundpipe_go import _native
print(f"{{before:x}} {{control():x}}")
""")
    before, after = output.split()
    assert after == before


def test_import_leaves_the_current_folder_alone(tmp_path):
    output = python(f"""
import os, torch
os.chdir({str(tmp_path)!r})
from roundpipe_go import _native
print(os.getcwd())
""")
    assert output.strip() == str(tmp_path)


def test_imports_from_a_deleted_folder(tmp_path):
    output = python(f"""
import os, torch
os.mkdir({str(tmp_path / "gone")!r})
os.chdir({str(tmp_path / "gone")!r})
os.rmdir({str(tmp_path / "gone")!r})
from roundpipe_go import _native
print(_native.ABI())
""")
    assert int(output) == _native.ABI()


# ---- what setup.py refuses


@pytest.fixture
def setup_py():
    """setup.py as a module."""
    spec = importlib.util.spec_from_file_location("roundpipe_go_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def path(tmp_path, monkeypatch):
    """An empty folder that is all of PATH, and no CC."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def command(folder: Path, name: str, says: str = "") -> Path:
    """Makes a command that prints one line."""
    file = folder / name
    file.write_text(f"#!/bin/sh\necho {says}\n")
    file.chmod(0o755)
    return file


def test_setup_serves_this_python(setup_py):
    assert setup_py.unsupported() is None


@pytest.mark.parametrize("target", ["linux-i686", "linux-riscv64", "macosx-14.0-arm64", "win-amd64"])
def test_setup_refuses_platform(setup_py, monkeypatch, target):
    monkeypatch.setattr(sysconfig, "get_platform", lambda: target)
    assert setup_py.unsupported() == (
        f"cannot build for 64-bit Python on {target}: the kernels are written for 64-bit Python on "
        "linux-x86_64 and linux-aarch64; use torch.optim.Adam here"
    )


def test_setup_refuses_32_bits(setup_py, monkeypatch):
    monkeypatch.setattr(setup_py.struct, "calcsize", lambda code: 4)
    assert setup_py.unsupported().startswith("cannot build for 32-bit Python on linux-")


@pytest.mark.parametrize("libc", [("", ""), ("musl", "1.2.5")])
def test_setup_refuses_musl(setup_py, monkeypatch, libc):
    monkeypatch.setattr(setup_py.platform, "libc_ver", lambda: libc)
    assert setup_py.unsupported().startswith("cannot build on musl (Alpine): its loader refuses")


def test_setup_refuses_free_threaded_python(setup_py, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    assert setup_py.unsupported().startswith("cannot build for free-threaded Python: the bindings gopy writes rely on the GIL")


def test_setup_refuses_to_go_without_go(setup_py, path):
    with pytest.raises(SystemExit, match=r"cannot build: there is no go on PATH, and go\.mod asks for 1\.26; install it"):
        setup_py.check_go()


@pytest.mark.parametrize(("version", "short"), [("go1.9", "1.9"), ("go1.22.1", "1.22"), ("go1.25.9-X:simd", "1.25")])
def test_setup_refuses_an_old_go(setup_py, path, version, short):
    command(path, "go", f"go version {version} linux/amd64")
    with pytest.raises(SystemExit, match=rf"cannot build: go on PATH is {short}, and go\.mod asks for 1\.26; install"):
        setup_py.check_go()


@pytest.mark.parametrize("version", ["go1.26", "go1.26.8-X:simd", "go1.27rc1", "devel go1.28-0123abc", "go2.0"])
def test_setup_takes_a_newer_go(setup_py, path, version):
    command(path, "go", f"go version {version} linux/amd64")
    assert setup_py.installed_go() >= setup_py.wanted_go()
    setup_py.check_go()


def test_setup_refuses_to_go_without_a_compiler(setup_py, path, monkeypatch):
    with pytest.raises(SystemExit, match=r"cannot build: no C compiler \(gcc, cc, clang\) is on PATH, .*install one"):
        setup_py.find_compiler()
    monkeypatch.setenv("CC", "ccache no-such-compiler")
    with pytest.raises(SystemExit, match=r"no C compiler \(ccache no-such-compiler\)"):
        setup_py.find_compiler()


def test_setup_takes_the_compiler_in_cc_first(setup_py, path, monkeypatch):
    for name in ["gcc", "clang"]:
        command(path, name)
    assert setup_py.find_compiler() == "gcc"
    monkeypatch.setenv("CC", "clang -m64")
    assert setup_py.find_compiler() == "clang -m64"


def test_setup_refuses_to_go_without_python_headers(setup_py, path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(path))
    with pytest.raises(SystemExit, match=r"cannot build: there is no Python\.h in .*install Python's headers"):
        setup_py.find_headers()


def test_setup_overrides_what_changes_the_result(setup_py, tmp_path, monkeypatch):
    users = {
        "GOFLAGS": "-mod=mod -race",
        "GOARCH": "wasm",
        "GOAMD64": "v3",
        "GOTOOLCHAIN": "auto",
        "GOWORK": "/nowhere/go.work",
        "CGO_ENABLED": "0",
        "CGO_CFLAGS": "-Ofast",
        "CGO_LDFLAGS": "-ffast-math",
    }
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    env = setup_py.go_environment(tmp_path)
    assert {name: value for name, value in users.items() if value in env[name]} == {}


def test_setup_shows_the_output_of_a_command_that_fails(setup_py, tmp_path):
    with pytest.raises(SystemExit, match="`sh -c 'echo broken here; exit 3'` failed with status 3:\nbroken here\n"):
        setup_py.run(["sh", "-c", "echo broken here; exit 3"], dict(os.environ), tmp_path)


def test_setup_stops_at_output_it_does_not_know(setup_py, tmp_path):
    generated = tmp_path / "native.go"
    generated.write_text("package main\n")
    with pytest.raises(SystemExit, match=r"gopy wrote a native\.go without '\^#cgo"):
        setup_py.rewrite(generated, (r"^#cgo [^\n]*\n", ""))
    assert generated.read_text() == "package main\n"


@pytest.mark.slow
def test_build_without_a_compiler_ends_in_one_sentence(tmp_path):
    env = {**os.environ, "CC": "no-such-compiler"}
    build = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={tmp_path}", f"--build-temp={tmp_path}"]
    result = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1, result.stdout
    assert result.stderr.splitlines()[-1].startswith("roundpipe-go: cannot build: no C compiler (no-such-compiler) is on PATH")
    assert "Traceback" not in result.stdout + result.stderr


# ---- sdist and wheel


def run(*command: str | Path, folder: Path = ROOT) -> None:
    """Runs a command; one that fails fails the test with its output."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, f"{command} ended with {result.returncode}\n{result.stdout}{result.stderr}"


@pytest.fixture(scope="session")
def sdist(tmp_path_factory) -> Path:
    """The source distribution, made from a copy of the tree: a build writes into it."""
    tree, out = tmp_path_factory.mktemp("tree") / "src", tmp_path_factory.mktemp("sdist")
    ignore = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=ignore)
    run(sys.executable, "-m", "build", "--sdist", f"--outdir={out}", tree)
    (file,) = out.iterdir()
    return file


def wheel_from(sdist: Path, out: Path) -> Path:
    """Builds a wheel, isolated, as pip does for a user."""
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", f"--wheel-dir={out}", sdist)
    (file,) = out.iterdir()
    return file


@pytest.fixture(scope="session")
def wheel(sdist, tmp_path_factory) -> Path:
    """The wheel built from the source distribution."""
    return wheel_from(sdist, tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_sdist_holds_all_sources(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = {"kernel": ["*.go", "*.s"], "goadam": ["*.go"], "pybind": ["*.go"], "python/roundpipe_go": ["*.py"]}
    sources = {file.relative_to(ROOT).as_posix() for f, globs in folders.items() for g in globs for file in (ROOT / f).glob(g)}
    wanted = sources | {"go.mod", "go.sum", "setup.py", "pyproject.toml", "LICENSE", "python/roundpipe_go/py.typed"}
    wanted |= {"scripts/disassemble.py", "scripts/lock.py", "requirements/build.txt"}
    assert wanted - names == set()
    assert [name for name in names if name.endswith(".so") or name.startswith(("kernel/_asm", "build"))] == []


@pytest.mark.slow
def test_wheel_holds_python_sources_and_one_extension(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {f"roundpipe_go/{file.name}" for glob in ["*.py", "*.pyi"] for file in PACKAGE.glob(glob)}
    record = Path(EXTENSION).with_suffix(".json")
    assert names == sources | {"roundpipe_go/py.typed", f"roundpipe_go/{EXTENSION}", f"roundpipe_go/{record}"}


@pytest.mark.slow
def test_wheel_from_sdist_steps_in_a_clean_environment(wheel, tmp_path):
    venv.create(tmp_path, with_pip=False)
    interpreter = tmp_path / "bin" / "python"
    site = Path(python("import sysconfig; print(sysconfig.get_path('purelib'))", str(interpreter)).strip())
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", site, wheel)
    # torch comes from here; Python reads no .pth of a folder that a .pth names, so an editable roundpipe_go does not.
    (site / "torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    code = """
import warnings, torch, roundpipe_go
from roundpipe_go import _native
warnings.simplefilter("error", roundpipe_go.FallbackWarning)
def stepped(adam):
    param = torch.ones(1000, requires_grad=True)
    param.grad = torch.linspace(-1, 1, 1000)
    adam([param], lr=0.1).step()
    return param
print(_native.__file__, torch.equal(stepped(roundpipe_go.Adam), stepped(torch.optim.Adam)))
"""
    file, equal = python(code, str(interpreter)).split()
    assert Path(file) == site / "roundpipe_go" / EXTENSION
    assert equal == "True"


@pytest.mark.slow
def test_wheels_from_one_sdist_hold_the_same_extension(sdist, wheel, tmp_path):
    images = []
    for file in [wheel, wheel_from(sdist, tmp_path)]:
        with zipfile.ZipFile(file) as archive:
            images.append(archive.read(f"roundpipe_go/{EXTENSION}"))
    assert images[0] == images[1], f"{len(images[0])} and {len(images[1])} bytes differ"
