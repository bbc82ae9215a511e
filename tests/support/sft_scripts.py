"""The standard script of TRL's SFTTrainer, which differs only in the trainer that it imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedTokenizerFast

EXTRA = "SFTTrainer needs the extra: pip install 'lohan[trl]'"
trl = pytest.importorskip("trl", reason=EXTRA)
datasets = pytest.importorskip("datasets", reason=EXTRA)

WORDS = [
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
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <eos>{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", "user", "assistant", *WORDS]
    result = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    result.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=result,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * 7 + 3 * i) % len(WORDS)] for i in range(4 + number % 6))


def data(kind: str) -> Any:
    if kind == "text":
        rows = [{"text": sentence(n)} for n in range(24)]
    else:
        rows = [{"prompt": sentence(n), "completion": " " + sentence(n + 5)} for n in range(24)]
    return datasets.Dataset.from_list(rows)


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(WORDS) + 5,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config)


def script(
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
        model=(start or model)(),
        args=trl.SFTConfig(str(out), **settings),
        train_dataset=data(rows),
        eval_dataset=data(rows).select(range(6)),
        processing_class=tokenizer(),
        peft_config=peft,
        compute_metrics=metrics,
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def experts() -> Any:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=len(WORDS) + 5,
        router_aux_loss_coef=0.5,
    )
    return AutoModelForCausalLM.from_config(config)
