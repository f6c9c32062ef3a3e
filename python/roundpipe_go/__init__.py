"""``torch.optim.Adam`` and ``AdamW`` for CPU tensors, computed in Go: the same bits, several times sooner.

Replace ``torch.optim.AdamW`` by ``roundpipe_go.AdamW``; nothing else changes. ``python -m roundpipe_go`` tells what runs
on this machine and why.
"""

from importlib.metadata import version as _version

from ._diagnostics import build_info
from ._fallback import FallbackWarning
from ._memory import use_huge_pages
from ._settings import (
    available_backends,
    get_backend,
    get_num_threads,
    get_square_root,
    set_backend,
    set_num_threads,
    set_square_root,
)
from .adam import Adam, adam
from .adamw import AdamW

__version__ = _version("roundpipe-go")

__all__ = [
    "Adam",
    "AdamW",
    "FallbackWarning",
    "__version__",
    "adam",
    "available_backends",
    "build_info",
    "get_backend",
    "get_num_threads",
    "get_square_root",
    "set_backend",
    "set_num_threads",
    "set_square_root",
    "use_huge_pages",
]
