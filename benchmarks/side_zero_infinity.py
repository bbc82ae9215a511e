"""A child of vs_zero_infinity.py: the same steps in DeepSpeed, parameters and optimizer on NVMe.

It runs in the peer's environment, without LoHan. The settings are those that were fastest on a
machine with 2 cores; `pipeline` (overlapped swapping of optimizer state) is tried both ways.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import reference
from children import tell

BUFFER_PARAMS, PARAM_BUFFERS = 12_000_000, 5
LIVE_PARAMS, GROUP_PARAMS, STATE_BUFFERS = 40_000_000, 20_000_000, 12


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    os.environ.update(
        DS_ACCELERATOR="cpu",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(spec["port"]),
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
    )
    import deepspeed
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    deepspeed.init_distributed(dist_backend="gloo")
    config = AutoConfig.from_pretrained(spec["model"])
    settings = settings_of(spec, largest=config.vocab_size * config.hidden_size)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with safe_open(Path(spec["model"]) / "model.safetensors", framework="pt") as weights:
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
                parameter.copy_(weights.get_tensor(name))
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    model.train()
    engine, *_ = deepspeed.initialize(
        model=model, config=settings, model_parameters=model.parameters()
    )
    Path("/proc/self/clear_refs").write_text("5")  # Reset VmHWM, so that loading does not count.

    def step(ids: torch.Tensor) -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    tell({**reference.time_steps(spec, step), "deepspeed": deepspeed.__version__})
    sys.stdout.flush()
    os._exit(0)  # The swapper threads may keep the interpreter from exiting.


def settings_of(spec: dict[str, Any], *, largest: int) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": spec["ssd"], "pin_memory": False}
    buffer_params = max(BUFFER_PARAMS, largest)
    pipelined = bool(spec["pipeline"])
    return {
        "train_micro_batch_size_per_gpu": spec["batch"],
        "gradient_accumulation_steps": 1,
        "gradient_clipping": spec["clip"],
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": reference.LR,
                "betas": list(reference.BETAS),
                "eps": reference.EPS,
                "weight_decay": reference.WEIGHT_DECAY,
            },
        },
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_prefetch_bucket_size": buffer_params,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": LIVE_PARAMS,
            "sub_group_size": GROUP_PARAMS,
            "offload_param": {**nvme, "buffer_count": PARAM_BUFFERS, "buffer_size": buffer_params},
            "offload_optimizer": {
                **nvme,
                "buffer_count": STATE_BUFFERS,
                "pipeline_read": pipelined,
                "pipeline_write": pipelined,
            },
        },
        "aio": {
            "block_size": 2**20,
            "queue_depth": 8,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


if __name__ == "__main__":
    main()
