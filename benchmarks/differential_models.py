"""The models and batches of benchmarks/differential.py: tiny ones of every supported kind.

Shapes are as small as possible without being trivial, since 16-bit matrix products may be hundreds
of times slower than fp32 ones on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support import architectures, delayed_runs

WIDTH = 12
VOCAB = 48
CLASSES = 3
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One kind of model."""

    build: Callable[[float], nn.Module]  # takes the dropout rate
    batch: Callable[[torch.Generator, int, int], Batch]  # takes rows and tokens
    causal: bool = False  # LoHan computes the loss itself, in slices of tokens
    adapters: bool = False  # a model of transformers that takes LoRA
    stateful: bool = False  # a forward changes buffers, in the order of calls
    mixes_rows: bool = False  # the loss of a batch is not the mean over its rows
    routed: bool = False  # rounding can send a token to another expert
    dropout: bool = False  # the dropout rate is used


class Recurrent(nn.Module):
    """A residual LSTM layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.lstm(x)[0])


class Convolution(nn.Module):
    """A residual 1-D convolution with group normalisation."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(2, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.relu(self.norm(self.conv(x.transpose(1, 2))))).transpose(1, 2)


class BatchNormalised(nn.Module):
    """A residual convolution with batch normalisation: rows mix, and buffers change.

    The convolution has no bias, whose gradient would be nothing but rounding.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Expert(nn.Module):
    """A residual mixture of two experts with soft weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.up = nn.Parameter(0.3 * torch.randn(2, WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        mixed = torch.einsum("bti,eio,bte->bto", x, self.up, weights)
        return x + self.dropout(torch.tanh(mixed))


class Counting(nn.Module):
    """Counts its calls in a buffer that its result depends on."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + torch.tanh(self.linear(x)) * (1 + 0.1 * self.calls)


class Stack(nn.Module):
    """Three blocks of one class between two projections, with a loss of its own."""

    def __init__(self, block: Callable[[float], nn.Module], dropout: float) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(dropout) for _ in range(3))
        self.exit = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.exit(hidden.mean(1))
        return nn.functional.cross_entropy(logits.float(), target)


def stack_batch(generator: torch.Generator, rows: int, tokens: int) -> Batch:
    return {
        "x": torch.randn(rows, tokens, WIDTH, generator=generator),
        "target": torch.randint(0, CLASSES, (rows,), generator=generator),
    }


def text_batch(generator: torch.Generator, rows: int, tokens: int) -> Batch:
    """Return random tokens. The first two of each row have no label."""
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels}


def padded_batch(generator: torch.Generator, rows: int, tokens: int) -> Batch:
    """Return a text batch in which the end of one row is padded."""
    batch = text_batch(generator, rows, tokens)
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[-1, tokens - 2 :] = 0
    batch["labels"][-1, tokens - 2 :] = -100
    return {**batch, "attention_mask": mask}


def translation_batch(generator: torch.Generator, rows: int, tokens: int) -> Batch:
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=generator)
    labels = torch.randint(3, VOCAB, (rows, tokens - 2), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def class_batch(generator: torch.Generator, rows: int, tokens: int) -> Batch:
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.randint(0, CLASSES, (rows,), generator=generator),
    }


def net_batch(generator: torch.Generator, rows: int, tokens: int) -> Batch:
    shape = rows, tokens, delayed_runs.NET_WIDTH
    return {name: torch.randn(shape, generator=generator) for name in ("x", "target")}


def odd_batch(generator: torch.Generator, rows: int, tokens: int) -> Batch:
    return {"x": torch.randn(rows, tokens, architectures.MODULE_WIDTH, generator=generator)}


def streams_batch(generator: torch.Generator, rows: int, tokens: int) -> Batch:
    return {
        "x": torch.randn(rows, 4, architectures.MODULE_WIDTH, generator=generator),
        "c": torch.randn(rows, architectures.MODULE_WIDTH, generator=generator),
        "weight": torch.rand(rows, generator=generator),
    }


def config_of(name: str, dropout: float = 0.0) -> Any:
    """Return the configuration of a tiny model of transformers."""
    import transformers as tf

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        **SPECIAL,
    }
    grouped = {**sizes, "num_key_value_heads": 2, "use_cache": False}
    attention = {"attention_dropout": dropout}
    if name == "llama":
        return tf.LlamaConfig(**grouped, **attention, tie_word_embeddings=False)
    if name == "tied":
        return tf.Qwen2Config(**grouped, **attention, tie_word_embeddings=True)
    if name == "moe":
        return tf.MixtralConfig(
            **grouped,
            **attention,
            num_local_experts=3,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
        )
    if name == "gpt2":
        return tf.GPT2Config(
            vocab_size=VOCAB,
            n_embd=16,
            n_layer=3,
            n_head=4,
            n_positions=32,
            use_cache=False,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            **SPECIAL,
        )
    if name == "t5":
        return tf.T5Config(
            vocab_size=VOCAB,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            num_heads=4,
            dropout_rate=dropout,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
        )
    if name == "bert":
        return tf.BertConfig(
            **sizes,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=CLASSES,
        )
    raise KeyError(name)


def build_transformer(name: str, dropout: float) -> nn.Module:
    import transformers as tf

    config = config_of(name, dropout)
    config._attn_implementation = "eager"
    kind = {
        "t5": tf.T5ForConditionalGeneration,
        "bert": tf.BertForSequenceClassification,
    }.get(name)
    model: nn.Module = tf.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    with torch.no_grad():  # Move biases and norms away from their trivial initial values.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def transformer(name: str, batch: Any, **flags: Any) -> Family:
    def build(dropout: float) -> nn.Module:
        return build_transformer(name, dropout)

    return Family(build, batch, adapters=True, dropout=True, **flags)


def stack(block: Callable[[float], nn.Module], **flags: Any) -> Family:
    return Family(lambda dropout: Stack(block, dropout), stack_batch, **flags)


def net(kind: str) -> Family:
    return Family(lambda dropout: delayed_runs.Net(kind, dropout), net_batch, dropout=True)


FAMILIES: dict[str, Family] = {
    "llama": transformer("llama", text_batch, causal=True),
    "gpt2": transformer("gpt2", padded_batch, causal=True),
    "tied": transformer("tied", text_batch, causal=True),
    "moe": transformer("moe", text_batch, causal=True, routed=True),
    "t5": transformer("t5", translation_batch),
    "bert": transformer("bert", class_batch),
    "lstm": stack(Recurrent, dropout=True),
    "conv": stack(Convolution, dropout=True),
    "batchnorm": stack(BatchNormalised, stateful=True, mixes_rows=True),
    "experts": stack(Expert, dropout=True),
    "net": net("plain"),
    "net-tied": net("tied"),
    "net-shared": net("several"),
    "streams": Family(lambda dropout: architectures.Streams(), streams_batch),
    "counting": stack(Counting, stateful=True),
    "centred": Family(
        lambda dropout: architectures.Plain(architectures.Centred), odd_batch, mixes_rows=True
    ),
    "outside": Family(
        lambda dropout: architectures.Plain(architectures.StepOutput, outside="parameter"),
        odd_batch,
    ),
}


def build_model(case: dict[str, Any]) -> nn.Module:
    """Return the model of a case, in fp32, with the same weights every time."""
    torch.manual_seed(3)
    model = FAMILIES[case["model"]].build(case["dropout"])
    names = [name for name, _ in model.named_parameters()]
    if case["frozen"] == "first":
        model.get_parameter(names[0]).requires_grad_(False)
    if case["frozen"] == "vectors":
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim > 1)
    if case["lora"]:
        from lohan.checkpoint.adapters import add_lora
        from lohan.optim import Lora

        model = add_lora(model, Lora(rank=case["lora"]))
        with torch.no_grad():  # Move adapters away from their initial zeros.
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0.0, 0.05)
    return model.train()


def batches(case: dict[str, Any]) -> tuple[list[list[Batch]], Batch]:
    """Return the batches of every step, one for each backward, and one for evaluations."""
    generator = torch.Generator().manual_seed(5)
    family, dtype = FAMILIES[case["model"]], DTYPES[case["dtype"]]

    def make() -> Batch:
        result = family.batch(generator, case["batch"], case["seq"])
        return {n: t.to(dtype) if t.is_floating_point() else t for n, t in result.items()}

    steps = [[make() for _ in range(case["accumulate"])] for _ in range(case["steps"])]
    return steps, make()


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out.loss


def inner_module(model: nn.Module) -> nn.Module:
    """Return a leaf inside the last block of the model's first list of blocks."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    leaves = [m for m in lists[0][-1].modules() if not list(m.children())]
    return next(leaf for leaf in leaves if list(leaf.parameters()))
