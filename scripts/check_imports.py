"""Fails if a layer imports what it must not: the table of allowed imports, and who may touch memory, C and _native."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

MODULE = "roundpipe-go"

# What each package may import beside the standard library, and which parts of the latter it must not.
GO = {
    "kernel": ({"github.com/klauspost/cpuid/v2"}, {"C", "os", "sync", "io", "net"}),
    "goadam": ({f"{MODULE}/kernel"}, {"C", "os", "net"}),
    "pybind": ({f"{MODULE}/kernel", f"{MODULE}/goadam"}, {"os", "net"}),
}
UNSAFE_IN_GOADAM = {"overlap.go"}
NATIVE_IMPORTER = "_binding.py"


def go_faults() -> list[str]:
    """Returns what the Go packages import against the table."""
    faults = []
    for name, (allowed, forbidden) in GO.items():
        output = subprocess.run(["go", "list", "-json", f"./{name}"], check=True, capture_output=True, text=True).stdout
        package = json.loads(output)
        for imported in package["Imports"]:
            outside = "." in imported.split("/")[0] or imported.startswith(MODULE)
            if (outside and imported not in allowed) or imported.split("/")[0] in forbidden:
                faults.append(f"{name} imports {imported}")
        if name == "goadam":
            for file in package["GoFiles"]:
                if file not in UNSAFE_IN_GOADAM and '"unsafe"' in Path(name, file).read_text():
                    faults.append(f"goadam/{file} imports unsafe")
    return faults


def python_faults() -> list[str]:
    """Returns the Python modules that import _native and must not."""
    faults = []
    for path in Path("python/roundpipe_go").glob("*.py"):
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        if "_native" in names and path.name != NATIVE_IMPORTER:
            faults.append(f"{path} imports _native; only {NATIVE_IMPORTER} may")
    return faults


if __name__ == "__main__":
    found = go_faults() + python_faults()
    print("\n".join(found) or "imports follow the table")
    sys.exit(bool(found))
