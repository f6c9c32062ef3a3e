"""Tables and plots of what was timed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from floors import FLOORS
from matplotlib.figure import Figure
from peers import OURS, PEERS, TORCH
from rounds import FRESH, HOPELESS, Result

BYTES = 28
"""Of memory traffic an element: parameter and two moments read and written, gradient read."""

COLORS = ("#ee854a", "#d5bb67", "#8c8c8c", "#6acc64", "#956cb4", "#1f5fa8")


def median(result: Result, mode: str, name: str) -> float:
    return statistics.median(result.ms[mode][name])


def spread(values: list[float]) -> float:
    """Half the distance of the quartiles, as a share of the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


def best_peer(result: Result, mode: str) -> str:
    return min((name for name in result.ms[mode] if name in PEERS and name != OURS), key=lambda name: median(result, mode, name))


def ratio(result: Result, mode: str) -> float:
    """How many times the time of ours the best peer takes."""
    return median(result, mode, best_peer(result, mode)) / median(result, mode, OURS)


def markdown(results: Iterable[Result], mode: str, names: list[str]) -> str:
    """One table: a row a work, the fastest in bold."""
    head = ["work", *names, "GB/s", "of copy", "best peer / ours", "bits", "quiet turns", "others' CPU"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for result in results:
        if not result.ms[mode][OURS]:
            continue
        fastest = min(names, key=lambda name: median(result, mode, name))
        cells = [result.work]
        for name in names:
            ms = f"{median(result, mode, name):.3g}"
            cell = f"**{ms}**" if name == fastest else ms
            cells.append(f"{cell} ±{spread(result.ms[mode][name]):.0%}" + ("†" if name in result.dropped else ""))
        gb_s = BYTES * result.numel / median(result, mode, OURS) / 1e6
        cells += [f"{gb_s:.1f}", f"{gb_s / result.copy_gb_s:.0%}", f"**{ratio(result, mode):.2f}** ({best_peer(result, mode)})"]
        cells += [bits(result), f"{statistics.mean(result.quiet.values()):.0%}", f"{result.others_cpu:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bits(result: Result) -> str:
    if OURS not in result.bits:
        return "not compared"
    others = [name for name, same in result.bits.items() if same and name != OURS]
    return ("equal" if result.bits[OURS] else "**DIFFER**") + (f"; also {', '.join(others)}" if others else "")


LEGEND = f"""\
Median milliseconds a step, ± half the distance of the quartiles. GB/s counts {BYTES} B an element for ours; "of copy" is its
share of what `a.copy_(b)` over 512 MiB moved just before and after, and exceeds 100% where caches hold the work. "Bits":
parameters and moments against {TORCH}'s default, after three rounds and at the end; peers not named there differ. "Quiet turns":
those in which nothing else ran on the machine before and after; if a contestant has three, only they count. "Others' CPU":
cores that other processes and the hypervisor took meanwhile. † more than {HOPELESS} times slower than ours in three rounds, then
left out.
"""


def floors_markdown(results: Iterable[Result], mode: str) -> str:
    """The table of parts of a step alone."""
    rows = [result for result in results if set(FLOORS) <= set(result.ms[mode])]
    if not rows:
        return ""
    head = ["floors of", *FLOORS, OURS, "ours / traffic", "tensors", "us a tensor: looks", "ours"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for result in rows:
        ms = {name: median(result, mode, name) for name in (*FLOORS, OURS)}
        cells = [
            result.work,
            *(f"{value:.3g}" for value in ms.values()),
            f"{ms[OURS] / ms['traffic']:.2f}",
            f"{result.tensors:,}",
        ]
        cells += [f"{1e3 * ms[name] / result.tensors:.3g}" for name in ("looks", OURS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def crowd(ms: dict[int, dict[str, float]]) -> str:
    """The table of several processes at once, a row a number of threads."""
    names = list(next(iter(ms.values())))
    lines = ["### 8 processes at once, each 100 x 10,000: ms a step of the slowest", ""]
    lines += ["| threads each | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    lines += [f"| {threads} | " + " | ".join(f"{row[name]:.3g}" for name in names) + " |" for threads, row in ms.items()]
    return "\n".join(lines) + "\n\n"


def counting(paces: dict[str, tuple[float, float]]) -> str:
    """The table of a Python thread that counts while a step runs."""
    lines = ["### a Python thread counts while 32 Mi elements are stepped on 1 thread", ""]
    lines += ["| | its pace, of that beside a sleeping main thread | ms a step beside it |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {share:.0%} | {ms:.3g} |" for name, (share, ms) in paces.items()]
    return "\n".join(lines) + "\n"


def write(
    results: list[Result], names: list[str], modes: Sequence[str], facts: dict[str, str], tables: list[str], folder: Path
) -> str:
    """Writes tables, numbers and plots into the folder; returns the tables, those given last."""
    text = [f"- {key}: {value}" for key, value in facts.items()] + ["", LEGEND]
    for threads in dict.fromkeys(result.threads for result in results):
        for mode in modes:
            rows = [result for result in results if result.threads == threads]
            text += [f"### {threads} threads, {mode}", "", markdown(rows, mode, names), "", floors_markdown(rows, mode), ""]
    text += tables
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tables.md").write_text("\n".join(text))
    (folder / "results.json").write_text(json.dumps({"facts": facts, "results": [asdict(r) for r in results]}, indent=1))
    if results:
        plot([result for result in results if result.threads == results[0].threads], names, folder)
    return "\n".join(text)


def plot(results: list[Result], names: list[str], folder: Path) -> list[Path]:
    """Draws what the results have: ratios by work, time against elements, time against tensors."""
    paths = []
    rows = [r for r in results if not r.work.startswith(("elements", "tensors"))]
    if rows:
        paths.append(_ratios(rows, folder / "ratio.png"))
    one = sorted((r for r in results if r.work.startswith("elements")), key=lambda r: r.numel)
    many = sorted((r for r in results if r.work.startswith("tensors")), key=lambda r: r.tensors)
    if len(one) > 1:
        paths.append(_times(one, [r.numel for r in one], names, "elements, in one tensor", folder / "elements.png"))
    if len(many) > 1:
        paths.append(_times(many, [r.tensors for r in many], names, "tensors of 1,000 elements", folder / "tensors.png"))
    return paths


def _ratios(rows: list[Result], path: Path) -> Path:
    figure = Figure(figsize=(8, 0.4 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    labels = [f"{r.work} ({best_peer(r, FRESH)})" for r in rows]
    bars = axes.barh(labels, [ratio(r, FRESH) for r in rows], color=COLORS[-1])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.margins(x=0.1)
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("time of the best peer / time of ours")
    figure.savefig(path, dpi=150)
    return path


def _times(rows: list[Result], xs: list[int], names: list[str], label: str, path: Path) -> Path:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, color in zip(names, COLORS, strict=False):
        axes.loglog(xs, [median(r, FRESH, name) for r in rows], marker="o", markersize=3, color=color, label=name)
    axes.set_xlabel(label)
    axes.set_ylabel("ms a step")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return path
