"""What people do to the memory under an optimizer, to its counters and in its hooks; where it is odd, torch computes."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import assume
from hypothesis.stateful import initialize, rule
from torch import Tensor, nn

import roundpipe_go
from cases import SERIAL_BELOW
from mirror import DECAYS, EPSS, LRS, SEEDS, MirrorBase, UsersError, values
from oracle import TORCH_CLASS, params_of

WIDE_SHAPES = st.sampled_from([(), (0,), (3,), (4, 5), (2, 3, 1), (2, 3, 4, 5), (33,)])
DTYPES = st.sampled_from([*[torch.float32] * 4, torch.float64, torch.complex64, torch.complex128, torch.bfloat16])
LAYOUTS = st.sampled_from(["contiguous", "transposed", "channels_last", "sliced", "offset"])
BETAS = st.sampled_from([(0.9, 0.999), (0.2, 0.0), (0.0, 0.9)])
WIDE_LRS = LRS | st.just(torch.tensor(0.02, dtype=torch.float64))
OTHER_DTYPE = {
    torch.float32: torch.float64,
    torch.float64: torch.float32,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex64,
    torch.bfloat16: torch.float32,
}
MOMENTS = st.sampled_from(["exp_avg", "exp_avg_sq", "max_exp_avg_sq"])


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in new memory, in another order where the number of dimensions allows it."""
    tensor = tensor.detach()
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    if layout == "channels_last" and tensor.dim() == 4:
        return tensor.clone(memory_format=torch.channels_last)
    if layout == "sliced":
        return tensor.new_zeros((*tensor.shape, 2))[..., 0].copy_(tensor)
    if layout == "offset":
        return tensor.new_zeros(tensor.numel() + 3)[3:].view(tensor.shape).copy_(tensor)
    return tensor.clone(memory_format=torch.contiguous_format)


def gradient(param: Tensor, form: str, seed: int) -> Tensor:
    dense = values(param.shape, seed, dtype=param.dtype)
    if form == "expanded":
        return values((), seed, dtype=param.dtype).expand(param.shape)
    if form == "negative":
        return torch._neg_view(dense)
    if form == "conjugate":
        return dense.conj()
    if form == "sparse":
        return dense.to_sparse()
    if form == "of_the_parameter":
        return param.detach()
    if form == "with_graph":
        return dense.requires_grad_() * 1
    return laid_out(dense, form)


def another_moment(optimizer: torch.optim.Optimizer, param: Tensor, key: str, form: str) -> Tensor:
    """What somebody puts in the place of a moment."""
    moment = optimizer.state[param][key]
    if form == "other_dtype":
        return moment.to(OTHER_DTYPE.get(moment.dtype, moment.dtype))
    if form == "expanded":
        return moment.new_ones(()).expand(moment.shape)
    if form == "negative":
        return torch._neg_view(moment.clone())
    if form == "shorter":
        return moment.flatten()[1:]
    if form == "of_the_parameter":
        return param.detach()
    if form == "other_moment":
        return optimizer.state[param]["exp_avg" if key == "exp_avg_sq" else "exp_avg_sq"]
    if form == "inference":
        with torch.inference_mode():
            return moment.clone()
    return laid_out(moment, form)


def move_storage(tensor: Tensor) -> None:
    """Frees the memory and takes it again, as sharding engines do between steps."""
    storage = tensor.untyped_storage()
    nbytes, kept = storage.nbytes(), storage.clone()
    storage.resize_(0)
    storage.resize_(nbytes)
    storage.copy_(kept)


def suits_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's fused kernel, which looks at addresses and lengths alone, stays within all tensors."""
    for param in params_of(optimizer):
        state = optimizer.state.get(param, {})
        tensors = [param, *([] if param.grad is None else [param.grad]), *(v for k, v in state.items() if k != "step")]
        alike = all(t.dtype is param.dtype and t.shape == param.shape and t.layout is torch.strided for t in tensors)
        if not alike or not all(t.is_contiguous() for t in tensors):
            return False
        if "step" in state and not (isinstance(state["step"], Tensor) and state["step"].dtype is torch.float32):
            return False
    return True


class MemoryRules(MirrorBase):
    """Rules beside those of ordinary use."""

    def teardown(self):
        roundpipe_go.set_num_threads(None)
        roundpipe_go.set_backend(None)

    @initialize(
        ours=st.sampled_from(list(TORCH_CLASS)),
        recipes=st.lists(st.tuples(WIDE_SHAPES, DTYPES, LAYOUTS, st.booleans()), min_size=1, max_size=4),
        special=st.sampled_from(["none"] * 7 + ["twice", "overlap", "long"]),
        seed=SEEDS,
        lr=WIDE_LRS,
        betas=BETAS,
        weight_decay=DECAYS,
        eps=EPSS,
        amsgrad=st.booleans(),
        maximize=st.booleans(),
        foreach=st.sampled_from([None, False, True]),
    )
    def start(self, ours, recipes, special, seed, **options):
        if isinstance(options["lr"], Tensor) and options["foreach"]:
            options["lr"] = options["lr"].item()  # the constructor refuses it otherwise

        def make_params():
            params = []
            for i, (shape, dtype, layout, named) in enumerate(recipes):
                tensor = laid_out(values(shape, seed + i, dtype=dtype), layout)
                params.append(nn.Parameter(tensor) if named else tensor.requires_grad_())
            if special == "twice":
                params.append(params[0])
            elif special == "overlap":
                buffer = values((40,), seed)
                params += [buffer[:30].requires_grad_(), buffer[10:].requires_grad_()]
            elif special == "long":  # enough for several threads
                params.append(values((SERIAL_BELOW + 77,), seed).requires_grad_())
            return params

        self.make_twins(make_params, ours, options)

    @rule(threads=st.sampled_from([None, 1, 2, 7]), backend=st.sampled_from([None, *roundpipe_go.available_backends()]))
    def change_settings_of_ours(self, threads, backend):
        roundpipe_go.set_num_threads(threads)
        roundpipe_go.set_backend(backend)

    @rule(
        index=SEEDS,
        seed=SEEDS,
        form=LAYOUTS | st.sampled_from(["expanded", "negative", "conjugate", "sparse", "of_the_parameter", "with_graph"]),
    )
    def step_with_another_gradient(self, index, seed, form):
        def action(optimizer):
            param = self.param(optimizer, index)
            param.grad = gradient(param, form, seed)
            try:
                optimizer.step()
            finally:
                if form == "sparse":  # else every step from now on is refused
                    param.grad = None

        self.both(action)

    @rule(index=SEEDS)
    def share_a_gradient(self, index):
        """Parameters of one shape may have one tensor as gradient."""

        def action(optimizer):
            first = self.param(optimizer, index)
            for param in params_of(optimizer):
                if (param.shape, param.dtype) == (first.shape, first.dtype):
                    param.grad = first.grad
            optimizer.step()

        self.both(action)

    @rule(
        index=SEEDS,
        key=MOMENTS,
        form=LAYOUTS
        | st.sampled_from(["other_dtype", "expanded", "negative", "shorter", "of_the_parameter", "other_moment", "inference"]),
    )
    def replace_a_moment(self, index, key, form):
        self.step_with_another_state(index, key, lambda *args: another_moment(*args, form))

    @rule(
        index=SEEDS,
        step=st.sampled_from([3, 0.5, torch.tensor(3), torch.tensor([2.0]), torch.tensor(7.0, dtype=torch.float64)]),
    )
    def replace_a_counter(self, index, step):
        another = lambda *_: step.clone() if isinstance(step, Tensor) else step  # noqa: E731
        self.step_with_another_state(index, "step", another)

    def step_with_another_state(self, index, key, another):
        """Replaced, and put back where torch refuses it: of two refusals in one step either may be told."""

        def replace(optimizer):
            param = self.param(optimizer, index)
            if key in optimizer.state.get(param, {}):
                optimizer.state[param][key] = another(optimizer, param, key)

        def put_back(optimizer):
            param = self.param(optimizer, index)
            if key in optimizer.state.get(param, {}):
                fresh = torch.tensor(5.0) if key == "step" else laid_out(torch.zeros_like(param), "contiguous")
                optimizer.state[param][key] = fresh

        self.both(replace)
        if self.both(lambda optimizer: optimizer.step()) is None:
            self.both(put_back)

    @rule(index=SEEDS, seed=SEEDS, layout=LAYOUTS)
    def swap_data_for_other_strides(self, index, seed, layout):
        def swap(optimizer):
            param = self.param(optimizer, index)
            param.data = laid_out(values(param.shape, seed, dtype=param.dtype), layout)

        self.both(swap)
        self.both(lambda optimizer: optimizer.step())

    @rule(index=SEEDS, with_state=st.booleans())
    def move_to_another_dtype_and_back(self, index, with_state):
        """``.data`` alone, for which torch then has words, or gradient and moments as well."""

        def move(optimizer, dtype):
            param = self.param(optimizer, index)
            grad, param.grad = param.grad, None
            param.data = param.data.to(dtype)
            if with_state:
                param.grad = None if grad is None else grad.to(dtype)
                state = optimizer.state.get(param, {})
                state.update({k: v.to(dtype) for k, v in state.items() if k != "step"})
            elif grad is not None:
                param.grad = torch.ones_like(param)

        dtype = self.param(self.twins.ours, index).dtype
        self.both(lambda optimizer: move(optimizer, OTHER_DTYPE[dtype]))
        self.both(lambda optimizer: optimizer.step())
        self.both(lambda optimizer: move(optimizer, dtype))

    @rule()
    def move_the_module(self):
        """``module.double()`` moves what is a Parameter, with its gradient; the state stays."""

        def module_of(optimizer):
            module = nn.Module()
            for i, param in enumerate(params_of(optimizer)):
                if isinstance(param, nn.Parameter):
                    module.register_parameter(f"p{i}", param)
            return module

        self.both(lambda optimizer: module_of(optimizer).double())
        self.both(lambda optimizer: optimizer.step())
        self.both(lambda optimizer: module_of(optimizer).float())

    @rule(index=SEEDS, key=st.sampled_from(["param", "exp_avg", "exp_avg_sq", "step"]), by=st.sampled_from(["resize_", "set_"]))
    def move_the_memory(self, index, key, by):
        def move(optimizer):
            param = self.param(optimizer, index)
            tensor = param if key == "param" else optimizer.state.get(param, {}).get(key)
            if isinstance(tensor, Tensor) and by == "resize_":
                move_storage(tensor)
            elif isinstance(tensor, Tensor):
                with torch.no_grad():
                    tensor.set_(tensor.detach().clone())

        self.both(move)
        self.both(lambda optimizer: optimizer.step())

    @rule(
        index=SEEDS,
        name=st.sampled_from(["fused", "capturable", "differentiable", "foreach"]),
        value=st.sampled_from([False, True]),
    )
    def switch_formula_for_a_step(self, index, name, value):
        if name == "fused":
            assume(suits_fused(self.twins.ours))
        before = self.group(self.twins.ours, index)[name]
        self.both(lambda optimizer: self.group(optimizer, index).update({name: value}))
        self.both(lambda optimizer: optimizer.step())
        self.both(lambda optimizer: self.group(optimizer, index).update({name: before}))

    @rule(when=st.sampled_from(["before", "after"]), error=st.sampled_from([UsersError, KeyboardInterrupt]))
    def hook_that_raises(self, when, error):
        """The step is taken or not, as in torch."""

        def action(optimizer):
            def hook(*_):
                raise error("in a hook")

            register = optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook
            handle = register(hook)
            try:
                optimizer.step()
            finally:
                handle.remove()

        self.both(action)

    @rule(
        what=st.sampled_from(["raise_first", "raise_last", "step"]),
        error=st.sampled_from([UsersError, KeyboardInterrupt, ZeroDivisionError]),
    )
    def closure_that_raises_or_steps(self, what, error):
        def action(optimizer):
            def closure() -> Any:
                if what == "raise_first":
                    raise error("in a closure")
                params = [param for param in params_of(optimizer) if param.requires_grad]
                if params:
                    sum((param.abs() * 0.3).sum().double() for param in params).backward()
                if what == "raise_last":
                    raise error("in a closure")
                return optimizer.step()

            return optimizer.step(closure)

        self.both(action)
