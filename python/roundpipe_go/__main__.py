"""``python -m roundpipe_go``: what a bug report needs. ``verify``: are the bits torch's here; ``vectorization``: is it SIMD."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from . import _vectorization
from ._diagnostics import build_info, report
from ._settings import get_square_root
from ._verify import verify


def _info(as_json: bool) -> int:
    """Prints the facts; returns the exit status."""
    print(json.dumps(build_info(), indent=2) if as_json else report())
    return 0


def _verify(as_json: bool) -> int:
    """Prints the comparison; returns the exit status: 1 if any bit differs or a setting rules equal bits out."""
    if get_square_root() != "auto":
        raise ValueError('the square root "ieee" was asked for, whose bits are not torch\'s: nothing to compare')
    rows = []
    if not as_json:
        print(report())
        print(f"\n{'parameters':<28}{'computed by':<14}{'runs':>4}  bits")
    for row in verify():
        rows.append(row)
        if not as_json:
            print(f"{row.name:<28}{row.served:<14}{row.runs:>4}  {'DIFFERENT' if row.different else 'equal'}", flush=True)
    equal = not any(row.different for row in rows)
    if as_json:
        print(json.dumps({"equal": equal, "rows": [asdict(row) for row in rows], "build_info": build_info()}, indent=2))
        return int(not equal)
    for row in rows:
        for difference in row.different:
            print(f"{row.name}: {difference}")
    for reason in dict.fromkeys(row.reason for row in rows if row.reason):
        print(f"torch: {reason}")
    print("all bits are torch's" if equal else "some bits are not torch's: please report the above")
    return int(not equal)


def _vectorized(as_json: bool, every: bool) -> int:
    """Prints what the kernels are made of; returns the exit status: 1 if an element is not updated by packed instructions."""
    facts = _vectorization.vectorization()
    print(json.dumps(facts, indent=2) if as_json else _vectorization.report(facts, every))
    return int(not facts["vectorized"])


def main() -> int:
    """Reads the command line, prints, and returns the exit status: 0 is yes, 1 is no or cannot tell."""
    parser = argparse.ArgumentParser(prog="python -m roundpipe_go", description="Prints what a bug report needs.")
    commands = "info: facts, the default; verify: compare with torch, bit by bit; vectorization: what the kernels are made of"
    parser.add_argument("command", nargs="?", choices=["info", "verify", "vectorization"], default="info", help=commands)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--all", action="store_true", help="vectorization: list also the kernels that other machines run")
    arguments = parser.parse_args()
    try:
        if arguments.command == "verify":
            return _verify(arguments.json)
        if arguments.command == "vectorization":
            return _vectorized(arguments.json, arguments.all)
        return _info(arguments.json)
    except (ImportError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
