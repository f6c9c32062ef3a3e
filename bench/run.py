"""Times roundpipe_go.Adam beside its peers, in one process, round by round.

    python bench/run.py                  # everything
    python bench/run.py --quick          # the rows of the table, all threads, after a backward only
    python bench/run.py --work "4 Mi" --peer fused --seconds 5
    python bench/run.py --list           # the names of works and peers

Writes results.json, tables.md and plots into a folder, and prints the tables.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import company
import floors
import machine
import peers
import psutil
import report
import rounds
import torch
from tqdm import tqdm
from works import ELEMENTS, ROWS, TENSORS, Work

BYTES_PER_CONTESTANT = 12
"""An element: parameter and two moments. The gradient is shared."""

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", action="append", metavar="NAME", help="only works of that name; may be repeated")
    parser.add_argument("--peer", action="append", metavar="NAME", help="only that peer, beside torch and ours; may be repeated")
    parser.add_argument("--threads", type=int, action="append", metavar="N", help="default: all, then 1")
    parser.add_argument("--seconds", type=float, help="for each work and number of threads (default: 10; quick: 2)")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: processor time of all threads; on a busy machine, with --threads 1"
    )
    parser.add_argument("--quick", action="store_true", help="rows of the table, all threads only")
    parser.add_argument("--floors", action="store_true", help="also parts of a step alone, as more contestants")
    parser.add_argument("--out", type=Path, default=Path(".bench"), help="folder for the results (default: .bench)")
    parser.add_argument("--list", action="store_true", help="print the names of works and peers, and stop")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[tuple[Work, int]]:
    """The works with their numbers of threads, in the order of the tables."""
    everything = ROWS + ELEMENTS + TENSORS
    unknown = set(options.work or ()) - {work.name for work in (*everything, *company.WORKS)}
    if unknown:
        raise SystemExit(f"bench: no work {sorted(unknown)}; --list has the names")
    if options.work:
        works: tuple[Work, ...] = tuple(work for work in everything if work.name in options.work)
    else:
        works = ROWS if options.quick else everything
    threads = threads_of(options)
    return [(work, n) for n in threads for work in works if not work.sweep or n == threads[0]]


def threads_of(options: argparse.Namespace) -> list[int]:
    most = torch.get_num_threads()
    return options.threads or ([most] if options.quick or most == 1 else [most, 1])


def fits(work: Work, contestants: int) -> bool:
    need = work.numel * 4 + work.numel * BYTES_PER_CONTESTANT * contestants + 2 * machine.COPY_BYTES
    return need < 0.8 * psutil.virtual_memory().available


def main() -> None:
    options = arguments()
    if options.list:
        print("works:", *(f"  {work.name}" for work in (*ROWS, *ELEMENTS, *TENSORS, *company.WORKS)), sep="\n")
        print("peers:", *(f"  {name}" for name in peers.PEERS), sep="\n")
        return
    unknown = set(options.peer or ()) - set(peers.PEERS)
    if unknown:
        raise SystemExit(f"bench: no peer {sorted(unknown)}; --list has the names")
    plan = chosen(options)
    wanted = [n for n in peers.PEERS if not options.peer or n in (peers.TORCH, peers.OURS, *options.peer)]
    print("loading peers; RoundPipe and DeepSpeed compile at first use, a few minutes", flush=True)
    makes, absent = peers.load(wanted)
    if peers.OURS in absent:
        raise SystemExit(f"bench: ours is absent: {absent[peers.OURS]}")

    below = floors.load() if options.floors else {}
    modes = (rounds.FRESH,) if options.quick else (rounds.FRESH, rounds.AGAIN)
    seconds = options.seconds or (2 if options.quick else 10)
    begin = time.perf_counter()
    results: list[rounds.Result] = []
    left_out: list[str] = []
    tables: list[str] = []

    def write() -> str:
        facts = {
            **machine.describe(),
            **peers.versions(),
            **{f"absent: {name}": reason for name, reason in absent.items()},
            "left out": "; ".join(left_out) or "nothing",
            "clock": options.clock,
            "took": f"{time.perf_counter() - begin:.0f} s",
        }
        return report.write(results, list(makes), modes, facts, tables, options.out)

    progress = tqdm(plan)
    for work, threads in progress:
        progress.set_postfix_str(f"{work.name}, {threads} threads")
        under = {} if work.in_backward else below  # there each gradient is a new one
        if fits(work, len(makes) + len(under)):
            share = seconds / 2 if work.sweep else seconds
            results.append(rounds.run(work, makes, under, threads, share, modes, CLOCKS[options.clock]))
        else:
            left_out.append(f"{work.name}: too little free memory")
        write()  # an interrupted run leaves what it has
    if company.CROWD.name in (options.work or ()) or not (options.work or options.quick):
        tables.append(report.crowd({n: company.crowd(list(makes), n, seconds) for n in threads_of(options)}))
    if company.COUNTED.name in (options.work or ()) or not (options.work or options.quick):
        tables.append(report.counting(company.counting(makes, seconds)))
    print(write())
    if any(not same for r in results for name, same in r.bits.items() if name == peers.OURS):
        raise SystemExit("bench: bits differ from torch's")


if __name__ == "__main__":
    main()
