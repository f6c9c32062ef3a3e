"""``python -m roundpipe_go vectorization``: what the kernels in the installed binary are made of, as recorded at build time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import _binding, _settings
from ._torch_arithmetic import torch_arithmetic

COLUMNS = ("width", "elements", "packed", "fma", "scalar", "gathers", "calls", "tail")


def read_record(extension: Path) -> dict[str, Any]:
    """Returns what scripts/disassemble.py found in an extension, beside which setup.py left it.

    Raises:
        RuntimeError: there is no record, or it is of another binary.
    """
    file = extension.with_suffix(".json")
    if not file.is_file():
        raise RuntimeError(
            f"roundpipe_go: there is no {file.name} beside the extension, so what it is made of was not recorded; "
            "install objdump (apt install binutils) and build again (pip install .)"
        )
    record: dict[str, Any] = json.loads(file.read_text())
    sha256 = hashlib.sha256(extension.read_bytes()).hexdigest()
    if sha256 != record["sha256"]:
        raise RuntimeError(
            f"roundpipe_go: {file.name} is of another binary: it describes sha256 {record['sha256'][:16]}..., and "
            f"{extension.name} has {sha256[:16]}...; build again (pip install .)"
        )
    return record


def faults(name: str, kernel: dict[str, Any]) -> list[str]:
    """Says what keeps a kernel from updating every element of its main loop by packed instructions; empty if nothing does."""
    lane = 64 if "float64" in name else 32
    found = [f"{kernel[count]} {count}" for count in ("scalar", "gathers", "calls") if kernel[count]]
    if kernel["packed"] == 0:
        found.append("no packed arithmetic")
    elif kernel["elements"] * lane % kernel["width"] or kernel["width"] < 256:
        found.append(f"{kernel['elements']} elements a turn in registers of {kernel['width']} bits")
    if kernel["tail"] != "masked":
        found.append(f"tail {kernel['tail']}")
    return found


def running(names: Iterable[str], backend: str, arithmetic: str, square_roots: dict[str, str | None]) -> set[str]:
    """Returns which of the kernels a step on this machine calls."""
    names, found = list(names), set()
    for element, square_root in square_roots.items():
        if square_root is None:
            continue
        ours = [name for name in names if name.startswith(f"adam{backend.upper()}_{element}_")]
        whole = {name for name in ours if name.endswith((f"_{arithmetic}_{square_root}", f"_{square_root}_reciprocal"))}
        # Where a backend has no kernel with that square root, two stages surround the library's.
        found |= whole or {name for name in ours if name.endswith((f"_{arithmetic}_moments", "_update"))}
    return found


def vectorization() -> dict[str, Any]:
    """Returns the backend that this machine runs, and what every kernel in the installed binary is made of.

    Returns:
        A dictionary fit for JSON. ``vectorized`` is whether this machine runs kernels, all of them without fault; of each kernel
        ``here`` is whether it is one of these.

    Raises:
        ImportError, RuntimeError, ValueError: the native part does not load, has no valid record, or a setting is of no use.
    """
    backend = _settings.get_backend()
    extension = Path(_binding.build_info()["extension"])
    record = read_record(extension)
    chosen = {str(dtype).removeprefix("torch."): torch_arithmetic(dtype) for dtype in _binding.DTYPES}
    arithmetic = chosen["float32"].arithmetic
    square_roots = {element: choice.square_root for element, choice in chosen.items()}
    run = running(record["kernels"], backend, arithmetic, square_roots)
    kernels = {
        name: {**kernel, "here": name in run, "faults": faults(name, kernel)} for name, kernel in record["kernels"].items()
    }
    here = [kernel for kernel in kernels.values() if kernel["here"]]
    return {
        "vectorized": bool(here) and not any(kernel["faults"] for kernel in here),
        "backend": backend,
        "backends": list(_settings.available_backends()),
        "arithmetic": arithmetic,
        "square_roots": square_roots,
        "extension": extension.name,
        "sha256": record["sha256"],
        "disassembler": record["disassembler"],
        "kernels": kernels,
    }


def _range(values: Iterable[int]) -> str:
    low, high = min(values := list(values)), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def _answer(facts: dict[str, Any], here: dict[str, dict[str, Any]]) -> list[str]:
    if facts["vectorized"]:
        return ["yes: this machine updates every element by packed instructions, those of the tail under a mask"]
    if here:
        return [f"no: {name}: {', '.join(kernel['faults'])}" for name, kernel in here.items() if kernel["faults"]]
    if facts["backend"] == "generic":
        return ["no: this machine runs the backend generic, portable Go, one element at a time"]
    return ["no: no kernel gives this torch's bits here, so torch computes"]


def _main_loops(here: dict[str, dict[str, Any]]) -> list[str]:
    def total(column: str) -> str:
        return f"{sum(kernel[column] for kernel in here.values())} {column}"

    width, elements = (_range(kernel[column] for kernel in here.values()) for column in ("width", "elements"))
    lines = [
        f"{'main loops':<12}{width} bits wide, {elements} elements a turn; instructions in all: "
        f"{', '.join(total(column) for column in COLUMNS[2:-1])}"
    ]
    if any(name.endswith("_moments") for name in here):
        lines.append(f"{'':<12}_moments and _update surround oneMKL's square root, which is in torch and not in this binary")
    return lines


def report(facts: dict[str, Any], every: bool) -> str:
    """Returns what ``vectorization`` found as lines for people.

    Args:
        facts: what it returned.
        every: list all kernels of the binary, not only those that this machine runs.
    """
    here = {name: kernel for name, kernel in facts["kernels"].items() if kernel["here"]}
    listed = facts["kernels"] if every else here
    lines = [
        *_answer(facts, here),
        f"{'backend':<12}{facts['backend']}; this CPU can run {', '.join(facts['backends'])}",
        *(_main_loops(here) if here else []),
        f"{'binary':<12}{facts['extension']}, sha256 {facts['sha256'][:16]}...",
        f"{'read by':<12}{facts['disassembler']}, when it was built",
        f"{'kernels':<12}{len(here)} run here, of {len(facts['kernels'])}{'' if every else '; --all lists all'}",
    ]
    if listed:
        title = "instructions of a main loop, rare branches included"
        lines += ["", f"{title:<64}" + "".join(f"{column:>9}" for column in COLUMNS)]
        lines += [f"{name:<64}" + "".join(f"{kernel[c]:>9}" for c in COLUMNS) for name, kernel in listed.items()]
    return "\n".join(lines)
