"""Trains one language model twice, side by side: roundpipe_go.AdamW gives torch.optim.AdamW's bits, sooner.

    python examples/demo.py

Two trainers start from one seed and take turns, step by step, in one process, so that both meet the same conditions;
who goes first alternates. After every step the losses, all parameters and all optimizer state are compared bit by bit.
The exit status is 1 if anything differs.

torch's fused AdamW is timed, too: it steps a copy of the parameters with the same gradients. It rounds differently, so
its bits are not compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm
from train_gpt import (
    DEFAULT,
    Step,
    Trainer,
    add_arguments,
    check_folders,
    make_optimizer,
    median_ms,
    read_arguments,
    timed,
    tokens_per_second,
)

EPS = 1e-8
TORCH, FUSED, ROUNDPIPE = "torch.optim.AdamW", "torch.optim.AdamW(fused=True)", "roundpipe_go.AdamW"
COLORS = {TORCH: "#ee854a", FUSED: "#8c8c8c", ROUNDPIPE: "#1f5fa8"}


class FusedTimer:
    """Times torch's fused AdamW on a copy of a model's parameters."""

    def __init__(self, trainer: Trainer) -> None:
        self.source = trainer
        self.model = copy.deepcopy(trainer.model)
        self.optimizer = make_optimizer("torch-fused", self.model, trainer.config, EPS)
        self.seconds: list[float] = []

    def step(self) -> None:
        """Steps with the gradients and learning rate that the source has just used."""
        for own, source in zip(self.optimizer.param_groups, self.source.optimizer.param_groups, strict=True):
            own["lr"] = source["lr"]
        for own, source in zip(self.model.parameters(), self.source.model.parameters(), strict=True):
            own.grad = source.grad
        self.seconds.append(timed(self.optimizer.step))
        self.optimizer.zero_grad()


def bit_difference(name: str, a: Tensor, b: Tensor) -> str | None:
    """Says where two float32 tensors first differ in a bit, in words; None if nowhere."""
    a, b = a.detach().flatten(), b.detach().flatten()
    a_bits, b_bits = a.view(torch.int32), b.view(torch.int32)
    if torch.equal(a_bits, b_bits):
        return None
    differs = a_bits != b_bits
    i = int(differs.nonzero()[0])
    return (
        f"{name}[{i}] is {a[i].item().hex()} and {b[i].item().hex()}; "
        f"{int(differs.sum())} of its {differs.numel()} elements differ"
    )


def trainer_difference(a: Trainer, b: Trainer) -> str | None:
    """Says where two trainers' parameters or optimizer state first differ; None if nowhere."""
    for (name, a_param), (_, b_param) in zip(a.model.named_parameters(), b.model.named_parameters(), strict=True):
        a_state, b_state = a.optimizer.state[a_param], b.optimizer.state[b_param]
        if a_state.keys() != b_state.keys():
            return f"the state of {name} has the keys {sorted(a_state)} and {sorted(b_state)}"
        pairs = [(name, a_param, b_param)] + [(f"{key} of {name}", a_state[key], b_state[key]) for key in a_state]
        for pair in pairs:
            if difference := bit_difference(*pair):
                return difference
    return None


class Comparison:
    """A run of both optimizers side by side.

    Attributes:
        steps: the steps of each trainer.
        validation: each trainer's validation losses by the number of steps before them.
        difference: the first difference found, in words, or None.
    """

    def __init__(self, torch_trainer: Trainer, roundpipe_trainer: Trainer) -> None:
        self.trainers = {TORCH: torch_trainer, ROUNDPIPE: roundpipe_trainer}
        self.config = torch_trainer.config
        self.fused = FusedTimer(torch_trainer)
        self.steps: dict[str, list[Step]] = {name: [] for name in self.trainers}
        self.validation: dict[str, dict[int, float]] = {name: {} for name in self.trainers}
        self.difference: str | None = None

    def run(self) -> None:
        """Trains to the end, comparing after every step until the first difference."""
        order = list(self.trainers)
        with tqdm(total=self.config.steps, unit="step", disable=None) as bar:
            for done in range(1, self.config.steps + 1):
                for name in order:
                    self.steps[name].append(self.trainers[name].step())
                order.reverse()
                self.fused.step()
                if done % self.config.eval_interval == 0 or done == self.config.steps:
                    for name, trainer in self.trainers.items():
                        self.validation[name][done] = trainer.validate()
                if self.difference is None:
                    self.difference = self._compare(done)
                last = {name: steps[-1] for name, steps in self.steps.items()}
                bar.set_postfix_str(
                    f"loss {last[TORCH].loss:.3f}, optimizer ms: "
                    f"torch {1e3 * last[TORCH].optimizer_seconds:.2f}, "
                    f"roundpipe_go {1e3 * last[ROUNDPIPE].optimizer_seconds:.2f}, "
                    f"bits {'equal' if self.difference is None else 'DIFFER'}",
                    refresh=False,
                )
                bar.update()

    def optimizer_seconds(self) -> dict[str, list[float]]:
        """Returns the times of every optimizer step, in the order of the report."""
        seconds = {name: [step.optimizer_seconds for step in steps] for name, steps in self.steps.items()}
        return {TORCH: seconds[TORCH], FUSED: self.fused.seconds, ROUNDPIPE: seconds[ROUNDPIPE]}

    def report(self) -> str:
        """Returns the table and the verdict."""
        seconds = self.optimizer_seconds()
        lines = [f"{'':31}{'optimizer ms':>14}{'ratio':>8}{'tokens/s':>11}{'validation loss':>17}"]
        for name, values in seconds.items():
            ratio = median_ms(values) / median_ms(seconds[ROUNDPIPE])
            line = f"{name:31}{median_ms(values):14.2f}{ratio:8.2f}"
            if name in self.trainers:
                throughput = tokens_per_second(self.steps[name], self.config)
                line += f"{throughput:11,.0f}{self.validation[name][self.config.steps]:17.6f}"
            lines.append(line)
        lines.append(f"\noptimizer ms: median of {self.config.steps} steps; ratio: to {ROUNDPIPE}")
        if self.difference:
            lines.append(f"bits identical: NO\n{self.difference}")
        else:
            params = list(self.trainers[TORCH].model.parameters())
            lines.append(
                f"bits identical: yes, at all {self.config.steps} steps: loss, {len(params)} parameters "
                f"({numel(params):,} elements), exp_avg, exp_avg_sq, step"
            )
        return "\n".join(lines)

    def record(self) -> dict[str, object]:
        """Returns everything measured, for JSON; losses are hex floats."""
        return {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "config": asdict(self.config),
            "difference": self.difference,
            "losses": {name: [step.loss.hex() for step in steps] for name, steps in self.steps.items()},
            "validation_losses": {
                name: {done: loss.hex() for done, loss in losses.items()} for name, losses in self.validation.items()
            },
            "seconds": {name: [step.seconds for step in steps] for name, steps in self.steps.items()},
            "optimizer_seconds": self.optimizer_seconds(),
        }

    def plot(self, path: Path) -> None:
        """Draws both loss curves and the time of every optimizer step."""
        figure = Figure(figsize=(12, 5.2), layout="constrained")
        losses, times = figure.subplots(1, 2)
        millions = numel(self.trainers[TORCH].model.parameters()) / 1e6
        verdict = "the same bits at every step" if self.difference is None else "the bits differ"
        figure.suptitle(
            f"{ROUNDPIPE} and {TORCH}: {verdict}\n"
            f"GPT with {millions:.1f} M parameters, {torch.get_num_threads()} threads, torch {torch.__version__}"
        )
        x = range(1, self.config.steps + 1)
        styles = {TORCH: {"linewidth": 3.5, "alpha": 0.6}, ROUNDPIPE: {"linewidth": 1.2, "linestyle": (0, (4, 3))}}
        markers = {TORCH: {"marker": "o", "markersize": 9, "alpha": 0.6}, ROUNDPIPE: {"marker": "x", "markersize": 6}}
        for name, steps in self.steps.items():
            y = [step.loss for step in steps]
            losses.plot(x, y, color=COLORS[name], label=f"{name}, training", **styles[name])
        for name, values in self.validation.items():
            x_validation, y = list(values), list(values.values())
            label = f"{name}, validation"
            losses.plot(x_validation, y, color=COLORS[name], linestyle="none", zorder=3, label=label, **markers[name])
        losses.set(title="Loss: one curve over the other", xlabel="step", ylabel="cross-entropy, nats per byte")

        for name, values in self.optimizer_seconds().items():
            milliseconds = [1e3 * s for s in values]
            median = median_ms(values)
            times.plot(x, milliseconds, color=COLORS[name], linestyle="none", marker=".", markersize=4, alpha=0.6)
            times.axhline(median, color=COLORS[name], linewidth=1.8, label=f"{name}, median {median:.2f} ms")
        times.set(title="Time of one optimizer step", xlabel="step", ylabel="milliseconds, log scale", yscale="log")
        times.yaxis.set_major_formatter("{x:g}")
        for axes in (losses, times):
            # Below the axes, where no curve runs through it.
            axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=1)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25, which="both")
        figure.savefig(path, dpi=130)

    def _compare(self, done: int) -> str | None:
        a, b = (self.steps[name][-1].loss for name in (TORCH, ROUNDPIPE))
        if a.hex() != b.hex():
            return f"step {done}: the loss is {a.hex()} and {b.hex()}"
        difference = trainer_difference(*self.trainers.values())
        return difference and f"step {done}: {difference}"


def numel(params: Iterable[Tensor]) -> int:
    """Returns the number of elements of all parameters."""
    return sum(param.numel() for param in params)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description="Compare roundpipe_go.AdamW with torch.optim.AdamW in training.")
    add_arguments(parser)
    parser.add_argument("--sample", type=int, default=300, help="bytes of text to write at the end" + DEFAULT)
    parser.add_argument("--prompt", default="def ", help="what the sample continues (default: '%(default)s')")
    parser.add_argument("--plot", type=Path, default=Path("demo.png"), help="file for the picture" + DEFAULT)
    parser.add_argument("--json", type=Path, help="file for a record of every step; losses as hex floats")
    parser.add_argument(
        "--perturb",
        action="store_true",
        help="double roundpipe_go's eps, to see that a difference is found: the exit status must be 1",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status, 1 if a bit differs."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        check_folders(args.plot, args.json)
        config, text = read_arguments(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    comparison = Comparison(
        Trainer(config, text, "torch", EPS), Trainer(config, text, "roundpipe", 2 * EPS if args.perturb else EPS)
    )
    comparison.run()
    print(comparison.report())
    comparison.plot(args.plot)
    if args.json:
        args.json.write_text(json.dumps(comparison.record(), indent=1) + "\n")
    print(f"picture: {os.path.relpath(args.plot)}")
    if args.sample:
        print(f"\n{comparison.trainers[ROUNDPIPE].model.sample(args.prompt, args.sample, config.seed)}")
    return 0 if comparison.difference is None else 1


if __name__ == "__main__":
    sys.exit(main())
