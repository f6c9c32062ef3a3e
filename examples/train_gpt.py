"""Trains a small byte-level GPT on CPU with the AdamW of your choice.

    python examples/train_gpt.py --optimizer roundpipe
    python examples/train_gpt.py --optimizer torch --text book.txt --steps 1000 --checkpoint book.pt

The text is the Python standard library's own source code unless ``--text`` names files. Only the optimizer's
constructor differs between the choices of ``--optimizer``; ``torch``, ``torch-foreach`` and ``roundpipe`` give the same
bits at every step, and a checkpoint written under one of them continues under another.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import pickle
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

VOCABULARY = 256  # one token is one byte
STDLIB_NBYTES = 2_000_000  # more than a few minutes of training reads, and loaded in an instant
VALIDATION_BATCHES = 8
DEFAULT = " (default: %(default)s)"
OPTIMIZERS = ("torch", "torch-foreach", "torch-fused", "roundpipe")


def option(default: int | float, description: str) -> Any:
    """Declares a field of Config that is a command-line option, too."""
    return field(default=default, metadata={"help": description})


@dataclass(frozen=True)
class Config:
    """What decides the course of a training run, apart from its text and its optimizer.

    Raises:
        ValueError: an option is out of range.
    """

    steps: int = option(300, "training steps")
    seed: int = option(0, "seed of the initial weights, the batches and the sample")
    batch_size: int = option(8, "sequences in a batch")
    context: int = option(64, "bytes in a sequence")
    layers: int = option(4, "transformer blocks")
    width: int = option(256, "features of a token")
    heads: int = option(4, "attention heads; divides the width")
    lr: float = option(2e-3, "learning rate at the end of the warm-up; a cosine takes it to a tenth")
    warmup: int = option(20, "steps of linear warm-up")
    beta1: float = option(0.9, "decay of the first moment")
    beta2: float = option(0.95, "decay of the second moment")
    weight_decay: float = option(0.1, "weight decay of the matrices; nothing else decays")
    clip: float = option(1.0, "largest norm of the gradient")
    eval_interval: int = option(50, "steps between two validation losses")

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "context", "layers", "width", "heads", "eval_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} is {getattr(self, name)}, want at least 1")
        for name in ("seed", "lr", "warmup", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{flag(name)} is {getattr(self, name)}, want a finite number from 0 up")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} is {getattr(self, name)}, want a number in [0, 1)")
        if not self.clip > 0:
            raise ValueError(f"--clip is {self.clip}, want a number above 0")
        if self.width % self.heads:
            raise ValueError(f"--width {self.width} is not a multiple of --heads {self.heads}")


def flag(name: str) -> str:
    """Returns the command-line option of a Config field."""
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of Config, the text and the threads to a parser."""
    for f in fields(Config):
        text = f.metadata["help"] + DEFAULT
        parser.add_argument(flag(f.name), type=type(f.default), default=f.default, help=text)
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        metavar="FILE",
        help="what to train on; repeat for more files (default: the Python standard library's sources)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="torch's threads; another number may change bits of the model's arithmetic" + DEFAULT,
    )


def read_arguments(args: argparse.Namespace) -> tuple[Config, Text]:
    """Builds what `add_arguments` asked for and sets torch's threads.

    Raises:
        ValueError: an option is out of range, or the text is too short.
        OSError: a text file cannot be read.
    """
    if args.threads < 1:
        raise ValueError(f"--threads is {args.threads}, want at least 1")
    torch.set_num_threads(args.threads)
    config = Config(**{f.name: getattr(args, f.name) for f in fields(Config)})
    return config, Text.load(args.text or stdlib_files(), config.context)


def check_folders(*paths: Path | None) -> None:
    """Raises ValueError if a file to write has no folder: better now than after the training."""
    for path in paths:
        if path and not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")


def stdlib_files() -> list[Path]:
    """Returns the top-level modules of the standard library by name, up to STDLIB_NBYTES."""
    files: list[Path] = []
    nbytes = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        nbytes += path.stat().st_size
        if nbytes > STDLIB_NBYTES:
            break
        files.append(path)
    if not files:
        raise ValueError("this Python has no standard library sources on disk; give a --text file")
    return files


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes to validate on, as uint8 tensors, and a digest of both."""

    train: Tensor
    validation: Tensor
    sha256: str

    @classmethod
    def load(cls, paths: list[Path], context: int) -> Text:
        """Reads files and holds out every tenth one, or the last tenth of a single one.

        Raises:
            ValueError: a part is shorter than one sequence and its last target.
            OSError: a file cannot be read.
        """
        contents = [path.read_bytes() for path in paths]
        if len(contents) == 1:
            cut = len(contents[0]) * 9 // 10
            parts = {"training": contents[0][:cut], "validation": contents[0][cut:]}
        else:
            parts = {
                "training": b"".join(content for i, content in enumerate(contents) if i % 10 != 1),
                "validation": b"".join(contents[1::10]),
            }
        for name, part in parts.items():
            if len(part) < context + 1:
                raise ValueError(
                    f"the {name} text has {len(part)} bytes, want at least {context + 1} (--context + 1); "
                    "give more --text or a smaller --context"
                )
        train, validation = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts.values())
        digest = hashlib.sha256(str(len(train)).encode() + b"".join(parts.values())).hexdigest()
        return cls(train, validation, digest)


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Returns the sequences that begin at `starts`, and their next bytes: two int64 tensors [starts, context]."""
    tokens = text[starts[:, None] + torch.arange(context + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then a GELU perceptron four times as wide."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only language model over bytes; the head shares the token embedding's weights."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.context = config.context
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                # The residual stream is a sum over blocks: its writers start smaller, so that the sum has unit scale.
                writes = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * config.layers) if writes else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of each next byte: [batch, tokens, VOCABULARY]."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return nn.functional.linear(self.norm(self.blocks(x)), self.token.weight)

    @torch.no_grad()
    def sample(self, prompt: str, nbytes: int, seed: int, temperature: float = 0.8) -> str:
        """Continues a prompt (a newline if empty) by `nbytes` drawn bytes; returns both as text."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt.encode() or b"\n")])
        for _ in range(nbytes):
            logits = self(tokens[:, -self.context :])[:, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def make_optimizer(name: str, model: nn.Module, config: Config, eps: float = 1e-8) -> torch.optim.Optimizer:
    """Builds one of OPTIMIZERS; matrices decay, embeddings, norms and biases do not."""
    matrices = {f"{n}.weight" for n, module in model.named_modules() if isinstance(module, nn.Linear)}
    decayed = [p for n, p in model.named_parameters() if n in matrices]
    others = [p for n, p in model.named_parameters() if n not in matrices]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    if name == "roundpipe":
        import roundpipe_go  # only here, so that the other choices run without it

        make = roundpipe_go.AdamW
    else:
        make = functools.partial(torch.optim.AdamW, foreach=name == "torch-foreach", fused=name == "torch-fused")
    return make(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=eps, weight_decay=config.weight_decay)


def learning_rate(step: int, config: Config) -> float:
    """Returns the rate of a step, counted from 0: linear warm-up, then a cosine down to a tenth."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


@dataclass(frozen=True)
class Step:
    """What one training step gave.

    Attributes:
        loss: mean cross-entropy of the batch before the update, in nats per byte.
        seconds: the whole step.
        optimizer_seconds: `optimizer.step()` alone.
    """

    loss: float
    seconds: float
    optimizer_seconds: float


class Trainer:
    """A model, its optimizer and its place in the text.

    Args:
        config: the run.
        text: what to train on.
        optimizer: one of OPTIMIZERS.
        eps: Adam's epsilon.
    """

    def __init__(self, config: Config, text: Text, optimizer: str, eps: float = 1e-8) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.text = text
        self.model = GPT(config)
        self.optimizer = make_optimizer(optimizer, self.model, config, eps)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.steps_done = 0

    def step(self) -> Step:
        """Trains on the next batch."""
        config = self.config
        begin = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.steps_done, config)
        starts = torch.randint(len(self.text.train) - config.context, (config.batch_size,), generator=self.generator)
        self.optimizer.zero_grad()
        loss = self._loss(self.text.train, starts)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        optimizer_seconds = timed(self.optimizer.step)
        self.steps_done += 1
        return Step(loss.item(), time.perf_counter() - begin, optimizer_seconds)

    @torch.no_grad()
    def validate(self) -> float:
        """Returns the mean loss over sequences spread evenly over the validation text, always the same ones."""
        last = len(self.text.validation) - self.config.context - 1
        starts = torch.linspace(0, last, VALIDATION_BATCHES * self.config.batch_size, dtype=torch.float64).long()
        batches = starts.split(self.config.batch_size)
        return sum(self._loss(self.text.validation, batch).item() for batch in batches) / len(batches)

    def save(self, path: Path) -> None:
        """Writes a checkpoint: the whole file or, if interrupted, no change at `path`."""
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            torch.save(
                {
                    "config": asdict(self.config),
                    "text": self.text.sha256,
                    "steps_done": self.steps_done,
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "generator": self.generator.get_state(),
                },
                file,
            )
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Continues from a checkpoint of the same run, whichever optimizer wrote it.

        Raises:
            ValueError: the file is no checkpoint, or of a run with other options or text.
            OSError: the file cannot be read.
        """
        try:
            saved = torch.load(path, weights_only=True)
            config, text = dict(saved["config"]), saved["text"]
        except (EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is not a checkpoint of this script") from error
        for name, want in asdict(self.config).items():
            if config.get(name) != want:
                raise ValueError(f"{path} was made with {flag(name)} {config.get(name)}, not {want}; give the same options")
        if text != self.text.sha256:
            raise ValueError(f"{path} was made from another text; give the same --text")
        # How the step is computed is this run's choice and no part of the training's state.
        for group, own in zip(saved["optimizer"]["param_groups"], self.optimizer.param_groups, strict=True):
            group.update(foreach=own["foreach"], fused=own["fused"])
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.generator.set_state(saved["generator"])
        self.steps_done = saved["steps_done"]

    def _loss(self, text: Tensor, starts: Tensor) -> Tensor:
        inputs, targets = windows(text, starts, self.config.context)
        return nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())


def timed(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def tokens_per_second(steps: list[Step], config: Config) -> float:
    """Returns the throughput of whole steps, validation apart."""
    return len(steps) * config.batch_size * config.context / sum(step.seconds for step in steps)


def median_ms(seconds: list[float]) -> float:
    """Returns the median in milliseconds."""
    return 1e3 * sorted(seconds)[len(seconds) // 2]


def train(trainer: Trainer, last_step: int, checkpoint: Path | None, interval: int) -> tuple[list[Step], dict[int, float]]:
    """Trains up to `last_step`; returns its steps, and validation losses by the number of steps done before."""
    steps: list[Step] = []
    validation: dict[int, float] = {}
    config = trainer.config
    with tqdm(total=config.steps, initial=trainer.steps_done, unit="step", disable=None) as bar:
        while trainer.steps_done < last_step:
            step = trainer.step()
            steps.append(step)
            done = trainer.steps_done
            bar.set_postfix_str(
                f"loss {step.loss:.3f}, {tokens_per_second(steps[-20:], config):,.0f} tokens/s, "
                f"optimizer {1e3 * step.optimizer_seconds:.2f} ms",
                refresh=False,
            )
            bar.update()
            if done % config.eval_interval == 0 or done == config.steps:
                validation[done] = trainer.validate()
                bar.write(f"step {done:5}: training loss {step.loss:.4f}, validation loss {validation[done]:.4f}")
            if checkpoint and (done % interval == 0 or done == last_step):
                trainer.save(checkpoint)
    return steps, validation


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on CPU.")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="roundpipe", help="whose AdamW to use" + DEFAULT)
    add_arguments(parser)
    parser.add_argument("--checkpoint", type=Path, help="file to save to, at intervals and at the end")
    parser.add_argument("--checkpoint-interval", type=int, default=100, help="steps between two checkpoints" + DEFAULT)
    parser.add_argument("--resume", type=Path, help="checkpoint to continue from, under the same options")
    parser.add_argument("--stop-at", type=int, help="leave early, after this many steps of the schedule")
    parser.add_argument("--sample", type=int, default=200, help="bytes of text to write at the end" + DEFAULT)
    parser.add_argument("--prompt", default="def ", help="what the sample continues (default: '%(default)s')")
    parser.add_argument("--json", type=Path, help="file for a record of every step; losses as hex floats")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        for name, least in (("checkpoint_interval", 1), ("stop_at", 1), ("sample", 0)):
            value = getattr(args, name)
            if value is not None and value < least:
                raise ValueError(f"{flag(name)} is {value}, want at least {least}")
        check_folders(args.checkpoint, args.json)
        config, text = read_arguments(args)
        trainer = Trainer(config, text, args.optimizer)
        if args.resume:
            trainer.load(args.resume)
        last_step = min(args.stop_at or config.steps, config.steps)
        if trainer.steps_done >= last_step:
            raise ValueError(f"{args.resume} has {trainer.steps_done} steps already, nothing is left up to {last_step}")
    except (ValueError, OSError) as error:
        parser.error(str(error))

    first_step = trainer.steps_done
    steps, validation = train(trainer, last_step, args.checkpoint, args.checkpoint_interval)
    optimizer_seconds = [step.optimizer_seconds for step in steps]
    print(
        f"{args.optimizer}: {sum(p.numel() for p in trainer.model.parameters()):,} parameters, "
        f"steps {first_step + 1} to {last_step}, {tokens_per_second(steps, config):,.0f} tokens/s, "
        f"optimizer {median_ms(optimizer_seconds):.2f} ms a step (median), last loss {steps[-1].loss:.4f}"
    )
    if args.sample:
        print(f"\n{trainer.model.sample(args.prompt, args.sample, config.seed)}")
    if args.json:
        record = {
            "optimizer": args.optimizer,
            "torch": torch.__version__,
            "threads": args.threads,
            "config": asdict(config),
            "first_step": first_step,
            "losses": [step.loss.hex() for step in steps],
            "validation_losses": {done: loss.hex() for done, loss in validation.items()},
            "seconds": [step.seconds for step in steps],
            "optimizer_seconds": optimizer_seconds,
            "tokens_per_second": tokens_per_second(steps, config),
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
