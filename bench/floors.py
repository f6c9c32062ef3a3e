"""Parts of a step, timed alone beside the real ones (--floors).

- hooks: torch's own code around ``step``, with nothing in it; ours enters it only in steps that are observed.
- looks: a C++ loop that asks each of a parameter's five tensors where it is, as any optimizer in C++ must.
- traffic: a C++ loop that reads four arrays and writes three with one addition each, on all threads, at addresses that it was
  given once. It leaves prefetching to the CPU, so that a step can be a little faster.

Looks and traffic go without torch's hooks. They compute nothing of use, and are no peers.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from peers import Make
from torch import Tensor
from torch.utils.cpp_extension import load_inline

import roundpipe_go

SOURCE = """
#include <torch/extension.h>

struct Piece {
	float *param;
	const float *grad;
	float *exp_avg, *exp_avg_sq;
	int64_t n;
};

class Traffic {
public:
	Traffic(std::vector<at::Tensor> params, std::vector<at::Tensor> exp_avgs, std::vector<at::Tensor> exp_avg_sqs) {
		for (size_t i = 0; i < params.size(); i++) {
			float *param = params[i].data_ptr<float>(), *grad = params[i].grad().data_ptr<float>();
			float *exp_avg = exp_avgs[i].data_ptr<float>(), *exp_avg_sq = exp_avg_sqs[i].data_ptr<float>();
			int64_t n = params[i].numel(), piece = std::clamp<int64_t>(n / 16, 64, 1 << 15); // even shares
			for (int64_t at = 0; at < n; at += piece)
				pieces.push_back({param + at, grad + at, exp_avg + at, exp_avg_sq + at, std::min(piece, n - at)});
			numel += n;
		}
	}
	void step() {
		#pragma omp parallel for schedule(static) if (numel > 65536)
		for (size_t i = 0; i < pieces.size(); i++) {
			Piece p = pieces[i];
			#pragma omp simd
			for (int64_t k = 0; k < p.n; k++) {
				p.param[k] += p.grad[k];
				p.exp_avg[k] += p.grad[k];
				p.exp_avg_sq[k] += p.grad[k];
			}
		}
	}

private:
	std::vector<Piece> pieces;
	int64_t numel = 0;
};

int64_t look(const std::vector<at::Tensor> &params, const std::vector<at::Tensor> &state) {
	int64_t sum = 0;
	for (const at::Tensor &param : params)
		sum += (int64_t)param.data_ptr() ^ (int64_t)param.grad().data_ptr() ^ param.numel();
	for (const at::Tensor &tensor : state)
		sum += (int64_t)tensor.data_ptr() ^ tensor.numel();
	return sum;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
	py::class_<Traffic>(m, "Traffic")
		.def(py::init<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<at::Tensor>>())
		.def("step", &Traffic::step, py::call_guard<py::gil_scoped_release>());
	m.def("look", &look);
}
"""


@functools.cache
def _native() -> ModuleType:
    return load_inline("roundpipe_go_floors", SOURCE, extra_cflags=["-O3", "-march=native", "-fopenmp"])


class Floor(torch.optim.Adam):
    """Its first step makes Adam's state."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups)
        self.ready = False

    def tensors(self, name: str) -> list[Tensor]:
        """One tensor of each parameter's state."""
        return [self.state[param][name] for param in self.params()]

    def params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def step(self, closure: None = None) -> None:
        if self.ready:
            self.work()
        else:
            super().step()
            self.prepare()
            self.ready = True

    def prepare(self) -> None:
        """After the first step."""

    def work(self) -> None:
        """What a later step does."""


class Bare(Floor):
    """Without torch's hooks."""

    def step(self, closure: None = None) -> None:
        super().step(closure)

    step.hooked = True  # type: ignore[attr-defined]


class Looks(Bare):
    def prepare(self) -> None:
        self.state_tensors = [t for name in ("exp_avg", "exp_avg_sq", "step") for t in self.tensors(name)]
        self.all_params = self.params()

    def work(self) -> None:
        _native().look(self.all_params, self.state_tensors)


class Traffic(Bare):
    def prepare(self) -> None:
        roundpipe_go.use_huge_pages([*self.tensors("exp_avg"), *self.tensors("exp_avg_sq")])  # as ours
        self.traffic = _native().Traffic(self.params(), self.tensors("exp_avg"), self.tensors("exp_avg_sq"))

    def work(self) -> None:
        self.traffic.step()


FLOORS: dict[str, Make] = {"hooks": Floor, "looks": Looks, "traffic": Traffic}


def load() -> dict[str, Make]:
    """The floors, compiled."""
    _native()
    return FLOORS
