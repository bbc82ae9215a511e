"""The standard scripts of TRL's preference trainers, with LoHan or with TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support.sft_scripts import model, sentence, tokenizer

EXTRA = "trainers of preferences need the extra: pip install 'lohan[trl]'"
trl = pytest.importorskip("trl", reason=EXTRA)
datasets = pytest.importorskip("datasets", reason=EXTRA)

import lohan  # noqa: E402
import lohan.hf  # noqa: E402
from lohan.hf import trl as ours_of_trl  # noqa: E402

ROWS = 12
PAIRS = [
    {"prompt": sentence(n), "chosen": " " + sentence(n + 5), "rejected": " " + sentence(n + 9)}
    for n in range(ROWS)
]
RATED = [
    {"prompt": sentence(n), "completion": " " + sentence(n + 5), "label": n % 3 != 0}
    for n in range(ROWS)
]
KINDS: dict[str, tuple[str, Any, Any, Any]] = {
    "dpo": ("DPOTrainer", ours_of_trl.TheirDPO, trl.DPOConfig, PAIRS),
    "kto": ("KTOTrainer", ours_of_trl.TheirKTO, trl.KTOConfig, RATED),
    "reward": ("RewardTrainer", ours_of_trl.TheirReward, trl.RewardConfig, PAIRS),
}


def kind_of(name: str) -> tuple[str, Any, Any, Any]:
    if name == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return "ORPOTrainer", ORPOTrainer, ORPOConfig, PAIRS
    if name == "cpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return "CPOTrainer", CPOTrainer, CPOConfig, PAIRS
    return KINDS[name]


def scored() -> Any:
    torch.manual_seed(0)
    config = model().config
    config.num_labels, config.pad_token_id = 1, 0
    config.architectures = ["LlamaForCausalLM"]  # as `from_pretrained` has it of a checkpoint
    return AutoModelForSequenceClassification.from_config(config)


def script(
    name: str,
    out: Path,
    *,
    ours: bool,
    start: Any = None,
    peft: Any = None,
    train: bool = True,
    resume: Any = None,
    more: Any = None,
    stream: bool = False,
    **changes: Any,
) -> Any:
    """Run the standard script; only the imported trainer differs."""
    lohan_class, expected, arguments, rows = kind_of(name)
    settings = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "max_length": 32,
        "disable_tqdm": True,
        "adam_epsilon": 1e-4,
        **changes,
    }
    first = (start or (scored if name == "reward" else model))()
    if not ours and name in ("dpo", "kto") and peft is None:  # theirs would load it from a folder
        more = {"ref_model": (start or model)(), **(more or {})}
    data = datasets.Dataset.from_list(rows)
    trainer = (getattr(lohan.hf, lohan_class) if ours else expected)(
        model=first,
        args=arguments(str(out), **settings),
        train_dataset=data.to_iterable_dataset() if stream else data,
        eval_dataset=data.select(range(5)),
        processing_class=tokenizer(),
        peft_config=peft,
        **(more or {}),
    )
    if train:
        trainer.train(resume_from_checkpoint=resume)
    return trainer
