"""One optimizer step: what of it the kernels serve, and what runs through torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state as tracing_state
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import peek_interpreter_stack as transform
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from . import _binding, _descriptors, _fallback, _settings
from ._shards import local_shards
from ._torch_arithmetic import ARITHMETICS, SQUARE_ROOTS, torch_arithmetic

Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps."""

Options = dict[str, Any]
"""The keyword arguments of ``torch.optim.adam.adam``."""

_SHARED = (
    "tensors of this step share memory, or a parameter is in it more than once, so that the order of updates matters; "
    "give each parameter once, with memory of its own"
)
_GRADS, _MAXIMA = 1, 4  # among the lists

CONSTANTS = ("beta1", "beta2", "lr", "weight_decay", "eps", "amsgrad", "maximize", "decoupled_weight_decay")
"""The options from which a group's constants are formed."""

_TAKES_LR_OF_ONE_ELEMENT = hasattr(sys.modules["torch.optim.optimizer"], "_to_scalar")
"""Whether torch steps by an lr tensor that has dimensions; torch 2.6 raises."""


KNOWN: dict[str, list[tuple[int, int] | None]] = {setting: [None] * len(_binding.DTYPES) for setting in _settings.SQUARE_ROOTS}
"""The codes of arithmetic and square root that have torch's bits, by setting and dtype; None where they are not known yet."""


def tracing() -> bool:
    """Whether somebody watches torch's operations, who would not see ours: a compiler, a dispatch mode, a transform."""
    return is_compiling() or dispatch_modes() > 0 or tracing_state() is not None or transform() is not None


def unserved_options(options: Options) -> str | None:
    """Says why the kernels serve no parameter at all of a group with these options, or None."""
    if tracing():
        return "the step is being traced, or watched by a dispatch mode"
    if options["fused"]:
        return "fused=True asks for torch's fused kernel, whose last bits are others; leave it out"
    if options["capturable"] or options["differentiable"]:
        return _descriptors.CAPTURABLE
    if options["grad_scale"] is not None or options["found_inf"] is not None:
        return _descriptors.GRAD_SCALE
    if any(isinstance(options[name], Tensor) for name in ("beta1", "beta2", "weight_decay", "eps")):
        return "betas, weight_decay or eps are tensors, which torch rounds another way; give floats"
    beta1: Any = options["beta1"]
    if isinstance(beta1, Real) and abs(beta1) <= 2**-25:  # type: ignore[operator]  # 1 - beta1 is 1 in float32
        return (
            "beta1 is 0, or as good as 0 in float32: the signs of torch's zeros then depend on its vector width and its threads"
        )
    lr = options["lr"]
    if isinstance(lr, Tensor) and not (lr.is_cpu and type(lr) is Tensor):
        return "lr is a tensor of another device or of a subclass; give a float or a plain CPU tensor"
    if isinstance(lr, Tensor) and lr.dim() > 0 and not _TAKES_LR_OF_ONE_ELEMENT:
        return _descriptors.CONSTANTS
    if _binding.forked():
        return f"{_binding.FORKED}; start workers by spawn or forkserver"
    return None


def _unserved_decay(param: Tensor, options: Options) -> str | None:
    """Says why the kernels do not decay a parameter as torch does, or None."""
    if param.is_complex():
        return _descriptors.COMPLEX_DECAY
    lr = options["lr"]
    narrowed = isinstance(lr, Tensor) and lr.dtype is torch.float64 and param.dtype is torch.float32
    if narrowed and param.dim() == 0 and options["decoupled_weight_decay"]:
        return _descriptors.SCALAR_DECAY
    return None


@dataclass
class _Call:
    """A call of torch's function for what the kernels do not serve."""

    lists: Lists
    options: Options
    reason: str

    def run(self) -> None:
        """Runs it."""
        _fallback.torch_adam(self.lists, self.options)


def _run_protected(calls: list[_Call], rehearsal: bool = False) -> None:
    """Runs calls that may raise after they have written something. If one does, what any of them wrote is put back.

    After a rehearsal it is put back in any case.
    """
    lists = [some for call in calls for i, some in enumerate(call.lists) if i != _GRADS]
    written = [tensor for some in lists for tensor in some if isinstance(tensor, Tensor)]
    before = [tensor.detach().clone() for tensor in written]
    # A backward that has saved one of them sees by its version whether it was written.
    versions = [_unsafe_preserve_version_counter(tensor) for tensor in written if not tensor.is_inference()]
    done = False
    try:
        for call in calls:
            call.run()
        done = not rehearsal
    finally:
        if not done:
            with torch.inference_mode():  # torch refuses a write to its tensors only after it has written
                for tensor, values in zip(written, before):
                    if not (_overlaps_itself(tensor) or tensor._is_zerotensor()):  # such a write it refuses before
                        tensor.copy_(values)
            for version in versions:
                version.__exit__()


def _overlaps_itself(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """Where the storages begin that plain tensors live in."""
    return {
        tensor.untyped_storage().data_ptr()
        for tensor in tensors
        if type(tensor) in _descriptors.PLAIN_TYPES
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not tensor._is_zerotensor()
    }


class Kernels:
    """What the kernels of one dtype serve of a step.

    Attributes:
        unserved: why there are none that have torch's bits, or None.
        table: the parameters.
        written: the tensors that change, once for every time that torch would write to them.

    Raises:
        ValueError, RuntimeError: a setting of the environment is of no use.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        threads, backend, square_root = _settings.in_force()  # before anything of the step is written
        arithmetic = torch_arithmetic(dtype, square_root)
        self.unserved = arithmetic.why if arithmetic.square_root is None else None
        self.table = _descriptors.Table(dtype)
        self.written: list[Tensor] = []
        if arithmetic.square_root is not None:
            codes = ARITHMETICS.index(arithmetic.arithmetic), SQUARE_ROOTS.index(arithmetic.square_root)
            self._settings = {"threads": threads, "backend": backend, "arithmetic": codes[0], "square_root": codes[1]}
            KNOWN[square_root][_binding.DTYPES.index(dtype)] = codes

    def call(self) -> _binding.Call:
        """What ``_binding.step`` takes for the table."""
        return self.table.call(**self._settings)


class Step:
    """All groups of one step: ``add`` each, then ``run`` once. Until ``run`` nothing is written."""

    def __init__(self) -> None:
        self._kernels: dict[torch.dtype, Kernels] = {}
        self._added: list[tuple[Lists, Options]] = []
        self._unserved: list[_Call] = []

    def add(self, lists: Lists, options: Options) -> None:
        """Checks the parameters of a group and sorts them into those for the kernels and those for torch.

        Raises:
            RuntimeError: a step counter is not a tensor.
            Exception: whatever torch raises for a moment that is none.
        """
        if not all(isinstance(step, Tensor) for step in lists[-1]):
            raise RuntimeError("API has changed, `state_steps` argument must contain a list of singleton tensors")
        if not lists[0]:
            return
        if not options["amsgrad"]:
            lists = (*lists[:4], [], lists[5])  # torch does not look at it either
        self._added.append((lists, options))
        if not all(isinstance(moment, Tensor) for some in lists[_GRADS + 1 : -1] for moment in some):
            _run_protected(self._whole(), rehearsal=True)  # raises, in torch's words
        reason = unserved_options(options)
        if any(len(some) != len(lists[0]) for i, some in enumerate(lists) if i != _MAXIMA or options["amsgrad"]):
            reason = _descriptors.LENGTHS
        if reason is not None:
            self._unserved.append(_Call(lists, options, reason))
            return
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps = lists
        columns = [params, grads, exp_avgs, exp_avg_sqs] + ([max_exp_avg_sqs] if options["amsgrad"] else [])
        constants = {name: options[name] for name in CONSTANTS}
        decays = constants["weight_decay"] != 0
        groups: dict[tuple[Kernels, float], int] = {}
        unserved: dict[str, list[int]] = {}
        for i, (step, *tensors) in enumerate(zip(state_steps, *columns, strict=True)):
            written = (tensors[0], *tensors[2:], tensors[3], step)
            if decays and options["decoupled_weight_decay"]:
                written += (tensors[0],)
            if type(tensors[0]) not in _descriptors.PLAIN_TYPES:
                tensors = local_shards(tensors) or tensors
            reason = _descriptors.unserved(tensors, step)
            if reason is None and decays:
                reason = _unserved_decay(tensors[0], options)
            if reason is None:
                kernels = self._kernels_of(tensors[0].dtype)
                reason = kernels.unserved
            if reason is None:
                try:
                    key = kernels, _descriptors.next_step(step)
                    if key not in groups:
                        groups[key] = kernels.table.add_group(key[1], **constants)
                except Exception:  # whatever it is: torch finds the same, and has the words for it
                    reason = _descriptors.CONSTANTS
                else:
                    kernels.table.add_row(tensors, step, groups[key])
                    kernels.written += written
            if reason is not None:
                unserved.setdefault(reason, []).append(i)
        for reason, rows in unserved.items():
            some: Lists = tuple([tensors[i] for i in rows] if tensors else [] for tensors in lists)  # type: ignore[assignment]
            self._unserved.append(_Call(some, options, reason))

    def _kernels_of(self, dtype: torch.dtype) -> Kernels:
        """The kernels for parameters of a dtype that is served."""
        element = _descriptors.ELEMENTS[dtype]
        if element not in self._kernels:
            self._kernels[element] = Kernels(element)
        return self._kernels[element]

    def run(self) -> None:
        """Updates everything, or raises and has changed nothing of what the kernels serve."""
        whole = self._whole()
        if self._order_matters():
            _run_by_torch(whole, whole)
            return
        served = [kernels for kernels in self._kernels.values() if kernels.table.num_rows > 0]
        calls = [kernels.call() for kernels in served]
        if not _run_by_torch(self._unserved, whole):
            return
        if not served:
            return
        # Before the call: Ctrl-C after it would leave written tensors with old versions.
        increment_version([tensor for kernels in served for tensor in kernels.written])
        if _binding.step(calls):
            raise RuntimeError("roundpipe_go: the kernels refused tensors that had been found fit; please report it")

    def rehearse(self) -> None:
        """Raises what torch would raise in these groups, and changes nothing."""
        if any(call.reason == _descriptors.CONSTANTS or _may_fail(call) for call in self._unserved):
            _run_protected(self._whole(), rehearsal=True)

    def _whole(self) -> list[_Call]:
        """The calls by which torch would compute all groups."""
        return [_Call(lists, options, _SHARED) for lists, options in self._added]

    def _order_matters(self) -> bool:
        """Whether a parameter is updated twice, or those who update after each other, kernels and torch, share memory."""
        counters = [counter for kernels in self._kernels.values() for counter in kernels.table.counters]
        if len(set(counters)) < len(counters):
            return True
        values = [value for _, options in self._added for value in options.values() if isinstance(value, Tensor)]
        if values and _storages(values) & _storages(tensor for lists, _ in self._added for some in lists for tensor in some):
            return True  # torch reads an option when it comes to its group
        if any(options["foreach"] for _, options in self._added):
            # torch then goes through all parameters by one operation after the other.
            pointed = [tensor for kernels in self._kernels.values() for tensor in kernels.table.tensors if tensor.numel() > 0]
            if len(_storages(pointed)) < len(pointed):
                return True
        tensors = [kernels.table.tensors for kernels in self._kernels.values() if kernels.table.num_rows > 0]
        if self._unserved:
            tensors.append([tensor for call in self._unserved for some in call.lists for tensor in some])
        if len(tensors) < 2:
            return False
        storages = [_storages(some) for some in tensors]
        return len(set().union(*storages)) < sum(map(len, storages))


def _run_by_torch(calls: list[_Call], whole: list[_Call]) -> bool:
    """Runs the calls that torch computes, of the whole step. False if it has computed the others as well."""
    for call in calls:
        if call.reason != _descriptors.CONSTANTS:  # torch raises
            _fallback.warn(call.reason, call.lists[0])
    if not any(_may_fail(call) for call in calls):
        for call in calls:
            call.run()
        return True
    try:
        _run_protected(calls)
    except Exception:
        # All was put back. Of several errors torch raises that of the first group, or of the first of its own passes.
        _run_protected(whole)
        return False
    return True


def _may_fail(call: _Call) -> bool:
    """Whether torch's function may raise after it has written something: not under ordinary options with ordinary tensors."""
    if call.reason in _descriptors.FAILING or unserved_options(call.options) in _descriptors.FAILING:
        return True
    # It has counted before it finds that its fused kernel takes no complex tensor, that its foreach operations write to no
    # negated one, that a conjugated one has no real view, and that a lazy zero is not to be written.
    if any(
        tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor() or (tensor.is_complex() and call.options["fused"])
        for some in call.lists[:-1]
        for tensor in some
    ):
        return True
    for param, grad, *state in zip(*(some for some in call.lists[:-1] if some), strict=True):
        for tensor in (param, grad, *state):
            if tensor.dtype != param.dtype or tensor.shape != param.shape or tensor.device != param.device:
                return True
            if tensor.layout is not torch.strided:
                return True
        for tensor in (param, *state):
            if tensor.is_inference() or _overlaps_itself(tensor):
                return True
    return not tracing() and not _has_constants(call)  # under a mode, which would see what follows, torch is let alone


def _has_constants(call: _Call) -> bool:
    """Whether torch's expressions can be formed from the options and the step counters, in the dtypes of the parameters."""
    constants = {name: call.options[name] for name in CONSTANTS}
    for name, value in constants.items():
        if isinstance(value, Tensor) and not (name == "lr" and value.is_cpu and value.numel() == 1):
            return False
    if not all(_descriptors.is_counter(step) and not step.is_inference() for step in call.lists[-1]):
        return False
    try:
        for dtype, count in {(p.dtype.to_real(), _descriptors.next_step(s)) for p, s in zip(call.lists[0], call.lists[-1])}:
            _descriptors.Table(dtype).add_group(count, **constants)
    except Exception:  # of many types: see add_group
        return False
    return True
