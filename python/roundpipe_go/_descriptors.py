"""From tensors to the tables that the native step reads; ``pybind/doc.go`` describes them word by word.

Nothing here is kept between steps: addresses, shapes and options are read anew each time, so nothing can be stale.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _binding

_ROW_WORDS = 8
_GROUP_WORDS = 9
_STEP_WORD = 5
_STEP_FLOAT64 = 1 << 32
_NO_DECAY, _L2_DECAY, _DECOUPLED_DECAY = range(3)
_AMSGRAD, _MAXIMIZE = 1 << 2, 1 << 3

PLAIN_TYPES = frozenset((Tensor, Parameter))
"""The types whose memory is what it seems; a subclass may mean something else by it, or have none."""

ELEMENTS = {
    torch.float32: torch.float32,
    torch.complex64: torch.float32,
    torch.float64: torch.float64,
    torch.complex128: torch.float64,
}
"""The dtypes of the parameters that are served, and of the elements that the kernels see in them."""

_STEP_DTYPES = frozenset((torch.float32, torch.float64))

# Reasons why a parameter is left to torch.
SUBCLASS = "a parameter, gradient or state tensor is of a subclass of torch.Tensor; plain tensors are computed in Go"
DEVICE = "a parameter is not on the CPU; roundpipe_go computes on CPU tensors only"
DTYPE = "a parameter is not float32, float64, complex64 or complex128; only these are computed in Go"
COMPLEX_DECAY = "a complex parameter has weight decay, which torch rounds another way than for real ones"
SCALAR_DECAY = "lr is a float64 tensor and a parameter has no dimensions: torch then decays it in float64; give a float"
MIXED = "gradient or state differ from their parameter in dtype, device or shape; make them equal"
LAYOUT = "gradient, state and parameter are not in one dense order in memory; give them the strides of the parameter"
VIEW = "a tensor is a conjugate or negative view, or a lazy zero; call resolve_conj(), resolve_neg() or clone() on it"
MEMORY = "tensors of one parameter share memory, or are not aligned to their elements; give each aligned memory of its own"
INFERENCE = "a tensor was made in inference mode; make the parameters and take the first step outside of it"
STEP = "a step counter is not a float32 or float64 CPU tensor of one element; load the state anew"
CONSTANTS = "an option or a step counter has a value from which no constants can be formed"
LENGTHS = "the lists of tensors differ in length"

CAPTURABLE = "capturable and differentiable stand for another formula; leave them out"
GRAD_SCALE = "grad_scale and found_inf belong to torch's fused kernel; let the GradScaler unscale"

FAILING = frozenset((CAPTURABLE, GRAD_SCALE, MIXED, VIEW, INFERENCE, STEP, CONSTANTS, LENGTHS))
"""Reasons for which torch's own functions may raise, after they have written something."""


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, in whatever order of dimensions (channels_last, transposed)."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != extent:
                return False
            extent *= size
    return True


def _same_order(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors, equal in shape, are dense and lay out their elements in the same order."""
    param = tensors[0]
    if param.numel() < 2:
        return True
    order = [stride for stride, size in zip(param.stride(), param.shape) if size != 1]
    return _dense(param) and all([stride for stride, size in zip(t.stride(), t.shape) if size != 1] == order for t in tensors[1:])


def _apart(tensors: Sequence[Tensor]) -> bool:
    """Whether dense tensors are aligned, and none shares memory with another. One without memory is for Go to refuse."""
    starts = sorted((t.data_ptr(), t.numel() * t.element_size(), t.element_size()) for t in tensors if t.numel() > 0)
    end = 0
    for start, nbytes, element in starts:
        if start < end or start % min(element, 8):
            return False
        end = start + nbytes
    return True


def is_counter(step: Tensor) -> bool:
    """Whether a step counter is of a kind that torch makes."""
    return (
        type(step) is Tensor
        and step.dtype in _STEP_DTYPES
        and step.layout is torch.strided
        and step.numel() == 1
        and step.is_cpu
        and not (step.is_neg() or step._is_zerotensor())
    )


def unserved(tensors: Sequence[Tensor], step: Tensor) -> str | None:
    """Says why the kernels do not serve a parameter.

    Args:
        tensors: parameter, gradient, exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
        step: its step counter.

    Returns:
        One of the reasons above, or None: it is served.
    """
    param = tensors[0]
    device, dtype, shape = param.device, param.dtype, param.shape
    contiguous = True
    for tensor in tensors:
        if type(tensor) not in PLAIN_TYPES:
            return SUBCLASS
        if tensor.device != device or tensor.dtype is not dtype or tensor.shape != shape:
            return MIXED
        if tensor.layout is not torch.strided:
            return LAYOUT
        if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
            return VIEW
        if tensor.is_inference() and tensor is not tensors[1]:  # the gradient is only read
            return INFERENCE
        contiguous = contiguous and tensor.is_contiguous()
    if not param.is_cpu:
        return DEVICE
    if dtype not in ELEMENTS:
        return DTYPE
    if not contiguous and not _same_order(tensors):
        return LAYOUT
    if not is_counter(step):
        return STEP
    if step.is_inference():
        return INFERENCE
    if not _apart((*tensors, step)):
        return MEMORY
    return None


class Table:
    """The rows and groups of one native call, and the tensors they point into.

    Attributes:
        dtype: of the elements.
        rows: eight words a parameter.
        groups: nine words per set of options and distinct step count.
        tensors: everything the call reads or writes; hold the table until the call returns.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.rows = array("q")
        self.groups = array("d")
        self.tensors: list[Tensor] = []
        self._storages: list[torch.UntypedStorage] = []

    @property
    def num_rows(self) -> int:
        return len(self.rows) // _ROW_WORDS

    @property
    def num_groups(self) -> int:
        return len(self.groups) // _GROUP_WORDS

    @property
    def counters(self) -> array[int]:
        """The addresses of the step counters."""
        return self.rows[_STEP_WORD::_ROW_WORDS]

    def _checked(self, value: Any) -> float:
        """A scalar that torch converts with a check; the others become infinite in silence, there as here."""
        number = _number(value)
        if math.isfinite(number) and abs(number) > torch.finfo(self.dtype).max:
            raise OverflowError(f"{number} does not fit into {self.dtype}")
        return number

    def add_group(
        self,
        step: float,
        *,
        beta1: float,
        beta2: float,
        lr: float | Tensor,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        decoupled_weight_decay: bool,
    ) -> int:
        """Adds the constants of a step, by the expressions of torch's ``_single_tensor_adam``, in double precision.

        Args:
            step: the count after the increment. The rest are the options of ``torch.optim.adam.adam``.

        Returns:
            The group's index.

        Raises:
            Exception: of many types, and torch's function raises too, in its own words: a scalar does not fit into the
                dtype, a bias correction is 0 or complex, an option is no number.
        """
        bias_correction1 = 1 - beta1**step
        bias_correction2 = 1 - beta2**step
        step_size = lr / bias_correction1
        bias_correction2_sqrt = bias_correction2**0.5
        decay_kind, decay = _NO_DECAY, 0.0
        if weight_decay != 0:
            if decoupled_weight_decay:
                decay_kind, decay = _DECOUPLED_DECAY, _number(1 - lr * weight_decay)
            else:
                if type(weight_decay) is not float:
                    nothing = torch.empty(0, device="cpu")
                    nothing.add(nothing, alpha=weight_decay)  # raises for what torch takes for no number
                decay_kind, decay = _L2_DECAY, self._checked(weight_decay)
        flags = decay_kind | (_AMSGRAD if amsgrad else 0) | (_MAXIMIZE if maximize else 0)
        self.groups.extend(
            (
                decay,
                self._checked(1 - beta1),
                _number(beta2),
                self._checked(1 - beta2),
                float(bias_correction2_sqrt),
                self._checked(step_size),
                _number(eps),
                step,
                flags,
            )
        )
        return self.num_groups - 1

    def add_row(self, tensors: Sequence[Tensor], step: Tensor, group: int) -> None:
        """Adds one parameter that ``unserved`` has found nothing against."""
        # Held before the addresses are read: another thread may give a tensor other memory, as ``param.data = ...`` does.
        self._storages += [tensor.untyped_storage() for tensor in (*tensors, step)]
        param, grad, exp_avg, exp_avg_sq, *max_exp_avg_sq = tensors
        numel = param.numel()
        self.rows.extend(
            (
                param.data_ptr(),
                grad.data_ptr(),
                exp_avg.data_ptr(),
                exp_avg_sq.data_ptr(),
                max_exp_avg_sq[0].data_ptr() if max_exp_avg_sq else 0,
                step.data_ptr(),
                2 * numel if param.is_complex() else numel,
                group | (_STEP_FLOAT64 if step.dtype is torch.float64 else 0),
            )
        )
        self.tensors += tensors

    def call(self, *, threads: int, backend: int, arithmetic: int, square_root: int) -> _binding.Call:
        """What ``_binding.step`` takes for all rows, with the codes of Go."""
        return (
            self.rows.buffer_info()[0],
            self.num_rows,
            self.groups.buffer_info()[0],
            self.num_groups,
            _binding.DTYPES.index(self.dtype),
            threads,
            backend,
            arithmetic,
            square_root,
        )


def _number(value: Any) -> float:
    """A scalar of the types that torch's operations take: not a Fraction, a Decimal, an array or text, though they convert."""
    if type(value) is not float:
        torch.empty(0, device="cpu").mul(value)  # raises for what torch takes for no number
    return float(value)


def next_step(step: Tensor) -> float:
    """The value of a counter after torch's ``step += 1``. A float32 one stays at 2**24 once it is there."""
    value = float(step.item()) + 1.0
    return ctypes.c_float(value).value if step.dtype is torch.float32 else value
