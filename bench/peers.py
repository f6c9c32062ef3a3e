"""Who is timed. All but torch and ours are optional; one that is absent says why."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import roundpipe_go

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""From parameter groups to an optimizer: Adam without decay, torch's default options."""

TORCH, OURS = "torch", "roundpipe_go"


def _torch(**options: Any) -> Callable[[], Make]:
    return lambda: lambda groups: torch.optim.Adam(groups, **options)


def _ours() -> Make:
    # A step that torch computes must not pass for ours.
    warnings.simplefilter("error", roundpipe_go.FallbackWarning)
    return roundpipe_go.Adam


def _roundpipe() -> Make:
    # The package wants a GPU when it is imported; its optimizers do not.
    spec = importlib.util.find_spec("roundpipe")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("pip install --no-deps roundpipe")
    folder = Path(spec.submodule_search_locations[0]) / "optim"
    own = importlib.util.spec_from_file_location(
        "roundpipe_optim", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if own is None or own.loader is None:
        raise ImportError(f"no optimizers in {folder}")
    module = importlib.util.module_from_spec(own)
    sys.modules["roundpipe_optim"] = module
    own.loader.exec_module(module)
    module.Adam([torch.zeros(1)])  # compiles
    return module.Adam


def _deepspeed() -> Make:
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.zeros(1)])  # compiles
    return lambda groups: DeepSpeedCPUAdam(groups, adamw_mode=False)


PEERS: dict[str, Callable[[], Make]] = {
    TORCH: _torch(),
    "foreach": _torch(foreach=True),
    "fused": _torch(fused=True),
    "RoundPipe": _roundpipe,
    "DeepSpeed": _deepspeed,
    OURS: _ours,
}


def load(names: list[str]) -> tuple[dict[str, Make], dict[str, str]]:
    """Loads, and where they do so at first use compiles, the named peers.

    Returns:
        The constructors by name, and the reasons why others are absent.
    """
    made, absent = {}, {}
    for name in names:
        try:
            made[name] = PEERS[name]()
        except Exception as error:  # whatever a peer's build may raise: the others are still worth timing
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return made, absent


def versions() -> dict[str, str]:
    """The installed versions of the packages behind the names."""
    found = {}
    for package in ("torch", "roundpipe", "deepspeed", "roundpipe-go"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
