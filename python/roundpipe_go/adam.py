"""``torch.optim.Adam`` with the arithmetic in Go: the class and the function, under torch's names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback as dynamo
from torch.compiler import is_compiling
from torch.optim.optimizer import _use_grad_for_differentiable

from ._alone import Alone
from ._binding import EXCHANGE_API
from ._fallback import DECOUPLED_IN_ADAM, existing_threads, torch_adam
from ._hooks import profile_hook_step
from ._memory import use_huge_pages
from ._plain import step_plain
from ._step import Lists, Options, Step


def _moments(states: Iterable[Any]) -> list[Tensor]:
    """The tensors of optimizer states that are as large as their parameters."""
    own = [state for state in states if isinstance(state, dict)]  # users keep other things there as well
    return [value for state in own for name, value in state.items() if name != "step" and isinstance(value, Tensor)]


class Adam(torch.optim.Adam):
    """Adam for CPU tensors, with the bits of ``torch.optim.Adam`` in a fraction of its time.

    Arguments, state, ``state_dict``, hooks and errors are those of ``torch.optim.Adam``, from which the class inherits
    all but the step itself. Parameters in float32, float64, complex64 and complex128 are updated by one native call, which
    releases the GIL where it takes long; what the kernels do not serve runs through torch, with one ``FallbackWarning`` per
    reason.

    Args:
        params: parameters, named parameters or groups of them, as for torch.
        lr: learning rate (default: 1e-3); a float, or a tensor of one element.
        betas: decay rates of the two moments, each in [0, 1) (default: (0.9, 0.999)).
        eps: added to the denominator (default: 1e-8).
        weight_decay: L2 penalty, or decoupled decay if ``decoupled_weight_decay`` (default: 0).
        amsgrad: divides by the maximum of the second moments so far (default: False).
        foreach: accepted; the numbers are the same (default: None).
        maximize: ascends instead of descending (default: False).
        capturable, differentiable, fused: other formulas of torch; if True, torch computes (default: False, False, None).
        decoupled_weight_decay: AdamW's decay, from torch 2.7 on (default: False).

    Raises:
        ValueError, TypeError, RuntimeError: torch's own sentences for what torch refuses.

    References:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", https://arxiv.org/abs/1412.6980.
        Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond", https://openreview.net/forum?id=ryQu7f-RZ.
        ``torch.optim.Adam``, https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html.
    """

    profile_hook_step = staticmethod(profile_hook_step)

    # torch's step without the hooks that wrap it: a compiler follows its formulas, not ours.
    _torch_step = inspect.unwrap(torch.optim.Adam.step)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss; called once, with gradients on.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            RuntimeError: a gradient is sparse, or an option does not fit into the dtype, as in torch; another thread is in a step
                of this optimizer.
            ValueError: a setting of ours in the environment is of no use.
        """
        # Dynamo runs a frame without tensor operations, such as this one, uncompiled, where is_compiling() is False. (torch 2.6's
        # dynamo() gives away a reference that it does not own; there the way is not available.)
        if closure is None and EXCHANGE_API is not None and not is_compiling() and dynamo() is None and step_plain(self):
            return None
        return self._step(closure)

    @_use_grad_for_differentiable
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if is_compiling():
            return self._torch_step(closure)

        # Renamed in torch 2.10 or so, and deprecated under the old name.
        check = getattr(self, "_accelerator_graph_capture_health_check", None)
        (check or self._cuda_graph_capture_health_check)()

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        if closure is not None and step_plain(self):
            return loss
        with Alone(self), existing_threads():
            self._collected(self._init_groups()).run()
        return loss

    def _init_groups(self) -> list[tuple[dict[str, Any], Lists, bool]]:
        """The groups, their tensors, and whether some are complex. State that is missing is made, all of it or none."""
        without = [param for group in self.param_groups for param in group["params"] if self.state.get(param, {}) == {}]
        groups = []
        try:
            for group in self.param_groups:
                _, _ = group["betas"]  # as torch, which looks at them before it makes state
                lists: Lists = ([], [], [], [], [], [])
                has_complex = self._init_group(group, *self._init_arguments(group, lists))  # type: ignore[no-untyped-call]
                groups.append((group, lists, has_complex))
        except BaseException as error:  # out of memory, Ctrl-C, or a gradient that torch refuses
            for param in without:
                self.state.pop(param, None)
            if isinstance(error, Exception) and not isinstance(error, MemoryError):
                # torch would have computed these groups before it looked at the next one.
                self._collected(groups).rehearse()
            raise
        use_huge_pages(_moments(self.state[param] for param in without if param in self.state))
        return groups

    def _collected(self, groups: list[tuple[dict[str, Any], Lists, bool]]) -> Step:
        """The step of these groups."""
        step = Step()
        for group, lists, has_complex in groups:
            step.add(lists, {**self._options(group), "has_complex": has_complex})
        return step

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled or loaded state; torch calls it for both."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        use_huge_pages(_moments(self.state.values()))

    def _options(self, group: dict[str, Any]) -> Options:
        """The group's options under the names of the functional form, but for has_complex."""
        beta1, beta2 = group["betas"]
        return {
            "amsgrad": group["amsgrad"],
            "beta1": beta1,
            "beta2": beta2,
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "maximize": group["maximize"],
            "foreach": group["foreach"],
            "capturable": group["capturable"],
            "differentiable": group["differentiable"],
            "fused": group["fused"],
            "grad_scale": getattr(self, "grad_scale", None),
            "found_inf": getattr(self, "found_inf", None),
            "decoupled_weight_decay": self._decoupled(group),
        }

    def _decoupled(self, group: dict[str, Any]) -> bool:
        return bool(group["decoupled_weight_decay"]) if DECOUPLED_IN_ADAM else False

    @staticmethod
    def _init_arguments(group: dict[str, Any], lists: Lists) -> Sequence[Any]:
        return lists


def adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    foreach: bool | None = None,
    capturable: bool = False,
    differentiable: bool = False,
    fused: bool | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    has_complex: bool = False,
    decoupled_weight_decay: bool = False,
    *,
    amsgrad: bool,
    beta1: float | Tensor,
    beta2: float | Tensor,
    lr: float | Tensor,
    weight_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    """Functional Adam, with the signature and the bits of ``torch.optim.adam.adam``.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: tensors of one shape and dtype each, one entry a parameter; float32,
            float64, complex64 and complex128 on the CPU are computed in Go. All but ``grads`` are updated in place.
        max_exp_avg_sqs: as many if ``amsgrad``, else empty.
        state_steps: counters, tensors of one element, increased by 1.
        beta1, beta2, lr, weight_decay, eps, amsgrad, maximize, decoupled_weight_decay: see ``Adam``.
        foreach, capturable, differentiable, fused, grad_scale, found_inf, has_complex: as in torch.

    Raises:
        RuntimeError: a step is not a tensor, or an option does not fit into the dtype, in torch's words.
        IndexError: a list is shorter than ``params``, in torch's words.
    """
    lists: Lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
    recording = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for some in lists for t in some)
    options = {
        "foreach": foreach,
        "capturable": capturable,
        "differentiable": differentiable,
        "fused": fused,
        "grad_scale": grad_scale,
        "found_inf": found_inf,
        "has_complex": has_complex,
        "decoupled_weight_decay": decoupled_weight_decay,
        "amsgrad": amsgrad,
        "beta1": beta1,
        "beta2": beta2,
        "lr": lr,
        "weight_decay": weight_decay,
        "eps": eps,
        "maximize": maximize,
    }
    with existing_threads():
        if recording:  # torch refuses, or records
            torch_adam(lists, options)
            return
        step = Step()
        step.add(lists, options)
        step.run()
