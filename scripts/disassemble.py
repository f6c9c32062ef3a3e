"""Reads from a built extension what the loops of its kernels are made of: disassemble.py OBJDUMP EXTENSION writes JSON.

setup.py keeps the answer beside the extension, for ``python -m roundpipe_go vectorization``.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SYMBOL = re.compile(r"^[0-9a-f]+ <.*kernel\.((?:adam|sqrt)AVX\w+)\.abi0>:$")
"""The name of a kernel. Under the name without abi0 Go has a bridge for callers that pass arguments in registers."""

INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+([^#<]+)(<[^>]*>)?")
JUMP = re.compile(r"^j[a-z]+\s+(?:0x)?([0-9a-f]+)\s*$")
INCREMENT = re.compile(r"^addq?\s+\$(\w+),\s*%r\w+\s*$")

ARITHMETIC = re.compile(r"^v?(add|sub|mul|div|sqrt|rsqrt|rsqrt14|rcp|rcp14|max|min|cmp\w*|fn?m(add|sub)\d+)p[sd]$")
FMA = re.compile(r"^vfn?m(add|sub)\d+p[sd]$")
SCALAR = re.compile(r"^(?!v?broadcast)(\w+s[sd]|f[a-z]\w*)$")
"""Anything that works on one float, moves included: SSE, AVX and x87."""

MASKED = re.compile(r"^vmaskmov|\{%k")


class Instruction(NamedTuple):
    """One instruction: where it is, and its text with operands."""

    address: int
    text: str

    @property
    def mnemonic(self) -> str:
        """The text without operands."""
        return self.text.split(maxsplit=1)[0]


def functions(disassembly: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Yields the kernels in what ``objdump -d --no-show-raw-insn`` wrote, GNU's or LLVM's."""
    for block in disassembly.split("\n\n"):
        lines = block.strip().splitlines()
        if lines and (name := SYMBOL.match(lines[0])):
            matches = filter(None, map(INSTRUCTION.match, lines[1:]))
            yield name[1], [Instruction(int(match[1], 16), match[2].strip()) for match in matches]


def describe(code: list[Instruction]) -> dict[str, Any]:
    """Counts what the main loop of a kernel, the longest, is made of; says how what is left over is done.

    Returns:
        ``width``: bits of the narrowest vector register in packed arithmetic; ``elements``: how many a turn advances;
        ``packed``: arithmetic on whole registers, of it ``fma``; ``scalar``: instructions on one float; ``gathers``; ``calls``;
        ``tail``: "masked", "scalar" or "none".
    """
    loops = []
    for i, instruction in enumerate(code):
        jump = JUMP.match(instruction.text)
        if jump and int(jump[1], 16) < instruction.address:
            loops.append([c for c in code[: i + 1] if c.address >= int(jump[1], 16)])
    loop = max(loops, key=len, default=[])
    after = [c for c in code if loop and c.address > loop[-1].address]
    packed = [c for c in loop if ARITHMETIC.match(c.mnemonic)]
    widths = {"x": 128, "y": 256, "z": 512}
    increments = [int(match[1], 0) for c in loop if (match := INCREMENT.match(c.text))]
    tail = "masked" if any(MASKED.search(c.text) for c in after) else "none"
    return {
        "width": min((widths[r] for c in packed for r in re.findall(r"%([xyz])mm", c.text)), default=0),
        "elements": increments[0] if len(increments) == 1 else 0,
        "packed": len(packed),
        "fma": sum(bool(FMA.match(c.mnemonic)) for c in packed),
        "scalar": sum(bool(SCALAR.match(c.mnemonic)) for c in loop),
        "gathers": sum("gather" in c.mnemonic for c in loop),
        "calls": sum(c.mnemonic.startswith("call") for c in loop),
        "tail": "scalar" if any(SCALAR.match(c.mnemonic) for c in after) else tail,
    }


def record(objdump: str, extension: Path) -> dict[str, Any]:
    """Returns the description of every kernel in an extension, and whose it is."""
    listing = [objdump, "-d", "--no-show-raw-insn", "--section=.text", str(extension)]
    disassembly = subprocess.run(listing, check=True, capture_output=True, text=True).stdout
    version = subprocess.run([objdump, "--version"], check=True, capture_output=True, text=True).stdout
    return {
        "sha256": hashlib.sha256(extension.read_bytes()).hexdigest(),
        "disassembler": version.splitlines()[0].strip(),
        "kernels": {name: describe(code) for name, code in sorted(functions(disassembly))},
    }


if __name__ == "__main__":
    json.dump(record(sys.argv[1], Path(sys.argv[2])), sys.stdout, indent=1)
