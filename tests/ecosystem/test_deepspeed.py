"""DeepSpeed on its CPU accelerator in two processes: ZeRO of every stage, ZeRO-Offload, our class as client optimizer."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from .training import OPTIONS, assert_equal_on_all_ranks, each_class, engine, loss_of, make_batches, make_model

deepspeed = engine("deepspeed")

STEPS = 3


def with_zero(optimizer_class, stage, offload, directory):
    """Trains, saves a checkpoint half way and goes on from it in a new engine."""
    # Or the first engine compiles a shared-memory reduction, and keeps it in the cache of the user.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 12,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,  # DeepSpeed lists the exact classes it has tested
        "zero_force_ds_cpu_optimizer": False,  # or offload insists on DeepSpeedCPUAdam
        "zero_optimization": {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})},
    }

    def make():
        model = make_model()
        optimizer = optimizer_class(model.parameters(), **OPTIONS)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]

    def fit(zero, batches):
        for batch in batches:
            zero.backward(loss_of(zero, batch))
            zero.step()

    batches = make_batches(STEPS, seed=100 + dist.get_rank())
    path = f"{directory}/{optimizer_class.__module__}.{optimizer_class.__name__}"
    first = make()
    fit(first, batches[:2])
    first.save_checkpoint(path)
    second = make()
    second.load_checkpoint(path)
    fit(second, batches[2:])
    return [
        [
            deepspeed.utils.safe_get_full_fp32_param(param).clone(),
            *(deepspeed.utils.safe_get_full_optimizer_state(param, key).clone() for key in ("exp_avg", "exp_avg_sq")),
        ]
        for param in second.module.parameters()
    ]


@pytest.mark.parametrize("offload", [False, True], ids=["kept", "offloaded"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(group, stage, offload, tmp_path):
    assert_equal_on_all_ranks(group.run(each_class, with_zero, stage, offload, str(tmp_path)))
