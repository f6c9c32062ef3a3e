from __future__ import annotations

import os

import pytest
import torch

from . import processes

# Before an engine is imported: none of them may ask the network, or guess at devices.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", ACCELERATE_USE_CPU="1", DS_ACCELERATOR="cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """One thread for torch: the tensors are tiny, and the processes of a test share the cores. Engines change the rest."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    generator = torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_rng_state(generator)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """Two processes of a gloo group, for all tests of a module."""
    group = processes.Group(tmp_path_factory.mktemp("group"))
    yield group
    group.close()
