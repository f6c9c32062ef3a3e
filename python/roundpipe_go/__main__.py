"""``python -m roundpipe_go``: what a bug report needs."""

from __future__ import annotations

import argparse
import json

from ._diagnostics import build_info, report


def main() -> None:
    """Prints the facts, as text or JSON."""
    parser = argparse.ArgumentParser(prog="python -m roundpipe_go", description="Prints what a bug report needs.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    print(json.dumps(build_info(), indent=2) if arguments.json else report())


if __name__ == "__main__":
    main()
