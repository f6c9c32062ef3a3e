"""``python -m roundpipe_go``: what a bug report needs; ``python -m roundpipe_go verify``: whether the bits are torch's here."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from ._diagnostics import build_info, report
from ._settings import get_square_root
from ._verify import verify


def _verify(as_json: bool) -> int:
    """Prints the comparison; returns the exit status: 1 if any bit differs, 2 if a setting rules equal bits out."""
    if get_square_root() != "auto":
        print('the square root "ieee" was asked for, whose bits are not torch\'s: nothing to compare', file=sys.stderr)
        return 2
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


def main() -> int:
    """Reads the command line, prints, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m roundpipe_go", description="Prints what a bug report needs.")
    parser.add_argument("command", nargs="?", choices=["info", "verify"], default="info", help="verify: compare with torch")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.command == "verify":
        try:
            return _verify(arguments.json)
        except (ImportError, RuntimeError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
    print(json.dumps(build_info(), indent=2) if arguments.json else report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
