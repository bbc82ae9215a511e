"""Standard scripts of transformers' Trainer and TRL's trainers; only the import differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from tests.support.models import small_model

# -- transformers' Trainer -------------------------------------------------------------------------

pytest.importorskip("accelerate", reason="Trainer needs the extra: pip install 'lohan[hf]'")


TRAINER_SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": 3e-3,
    "weight_decay": 0.1,
    "warmup_steps": 3,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


def token_examples(count: int, *, vocab: int = 131, seed: int = 1) -> list[dict[str, list[int]]]:
    """Token lists of different lengths, so that batches are padded."""
    generator = torch.Generator().manual_seed(seed)
    created = []
    for number in range(count):
        length = 6 + (5 * number) % 9
        created.append(
            {"input_ids": torch.randint(3, vocab, (length,), generator=generator).tolist()}
        )
    return created


def collate_padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[number, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def run_trainer(kind: type, out: Path, *, model: nn.Module | None = None, **changes: Any) -> Any:
    """Run the standard causal-LM script; only the imported Trainer differs."""
    options = {
        key: changes.pop(key)
        for key in ("callbacks", "compute_metrics", "resume")
        if key in changes
    }
    resume = options.pop("resume", None)
    args = TrainingArguments(str(out), **{**TRAINER_SETTINGS, "max_steps": 6, **changes})
    trainer = kind(
        model=model or small_model("llama"),
        args=args,
        train_dataset=token_examples(20),
        eval_dataset=token_examples(10, seed=2),
        data_collator=collate_padded,
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged_values(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same_log(actual: Any, expected: Any, *, limit: float = 1e-4) -> None:
    for name in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        assert logged_values(actual, name) == pytest.approx(
            logged_values(expected, name), rel=limit
        ), name
    assert [row["step"] for row in actual.state.log_history] == [
        row["step"] for row in expected.state.log_history
    ]


def new_trainer(kind: type, out: Path, *, model: nn.Module | None = None, **changes: Any) -> Any:
    """Return a Trainer that has not trained."""
    names = ("eval_dataset", "compute_metrics", "compute_loss_func", "model_init", "lohan")
    options = {name: changes.pop(name) for name in names if name in changes}
    options.setdefault("eval_dataset", token_examples(10, seed=2))
    if kind is transformers.Trainer:
        options.pop("lohan", None)
    if "model_init" not in options:
        options["model"] = model or small_model("llama")
    args = TrainingArguments(str(out), **{**TRAINER_SETTINGS, "max_steps": 3, **changes})
    return kind(
        args=args, train_dataset=token_examples(20), data_collator=collate_padded, **options
    )


# -- TRL's SFTTrainer ------------------------------------------------------------------------------

SCRIPT_WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sees",
    "likes",
    "big",
    "small",
    "red",
    "old",
    "house",
    "tree",
    ".",
    "and",
]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <eos>{% endfor %}"


def script_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", "user", "assistant", *SCRIPT_WORDS]
    result = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    result.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=result,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def script_sentence(number: int) -> str:
    return " ".join(
        SCRIPT_WORDS[(number * 7 + 3 * i) % len(SCRIPT_WORDS)] for i in range(4 + number % 6)
    )


def sft_dataset(kind: str) -> Any:
    from datasets import Dataset

    if kind == "text":
        rows = [{"text": script_sentence(n)} for n in range(24)]
    else:
        rows = [
            {"prompt": script_sentence(n), "completion": " " + script_sentence(n + 5)}
            for n in range(24)
        ]
    return Dataset.from_list(rows)


def script_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(SCRIPT_WORDS) + 5,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config)


def run_sft_trainer(
    kind: type,
    out: Path,
    *,
    rows: str = "text",
    peft: Any = None,
    start: Any = None,
    metrics: Any = None,
    resume: Any = None,
    **changes: Any,
) -> Any:
    """Run the standard supervised fine-tuning script; only the imported trainer differs."""
    from trl import SFTConfig

    settings = {
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "max_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        **{name: value for name, value in changes.items() if name != "lohan"},
    }
    lohan_arguments = {"lohan": changes["lohan"]} if "lohan" in changes else {}
    trainer = kind(
        **lohan_arguments,
        model=(start or script_model)(),
        args=SFTConfig(str(out), **settings),
        train_dataset=sft_dataset(rows),
        eval_dataset=sft_dataset(rows).select(range(6)),
        processing_class=script_tokenizer(),
        peft_config=peft,
        compute_metrics=metrics,
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def script_experts() -> Any:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=len(SCRIPT_WORDS) + 5,
        router_aux_loss_coef=0.5,
    )
    return AutoModelForCausalLM.from_config(config)


# -- TRL's preference trainers ---------------------------------------------------------------------

SCRIPT_ROWS = 12
PAIR_ROWS = [
    {
        "prompt": script_sentence(n),
        "chosen": " " + script_sentence(n + 5),
        "rejected": " " + script_sentence(n + 9),
    }
    for n in range(SCRIPT_ROWS)
]
RATED_ROWS = [
    {"prompt": script_sentence(n), "completion": " " + script_sentence(n + 5), "label": n % 3 != 0}
    for n in range(SCRIPT_ROWS)
]


def preference_trainer(name: str) -> tuple[str, Any, Any, Any]:
    """Return the name of LoHan's trainer, TRL's trainer, its arguments and rows for it."""
    if name == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return "ORPOTrainer", ORPOTrainer, ORPOConfig, PAIR_ROWS
    if name == "cpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return "CPOTrainer", CPOTrainer, CPOConfig, PAIR_ROWS
    import trl

    from lohan.hf import trl as trl_trainers

    return {
        "dpo": ("DPOTrainer", trl_trainers.TheirDPO, trl.DPOConfig, PAIR_ROWS),
        "kto": ("KTOTrainer", trl_trainers.TheirKTO, trl.KTOConfig, RATED_ROWS),
        "reward": ("RewardTrainer", trl_trainers.TheirReward, trl.RewardConfig, PAIR_ROWS),
    }[name]


def script_reward_model() -> Any:
    torch.manual_seed(0)
    config = script_model().config
    config.num_labels, config.pad_token_id = 1, 0
    config.architectures = ["LlamaForCausalLM"]  # as `from_pretrained` has it of a checkpoint
    return AutoModelForSequenceClassification.from_config(config)


def run_preference_trainer(
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
    from datasets import Dataset

    import lohan.hf

    lohan_class, expected, arguments, rows = preference_trainer(name)
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
    first = (start or (script_reward_model if name == "reward" else script_model))()
    if not ours and name in ("dpo", "kto") and peft is None:  # theirs would load it from a folder
        more = {"ref_model": (start or script_model)(), **(more or {})}
    data = Dataset.from_list(rows)
    trainer = (getattr(lohan.hf, lohan_class) if ours else expected)(
        model=first,
        args=arguments(str(out), **settings),
        train_dataset=data.to_iterable_dataset() if stream else data,
        eval_dataset=data.select(range(5)),
        processing_class=script_tokenizer(),
        peft_config=peft,
        **(more or {}),
    )
    if train:
        trainer.train(resume_from_checkpoint=resume)
    return trainer
