"""From a Hugging Face config.json to a model shape, without torch or transformers.

Parameter counts are those of the model that transformers builds from the same file. A key that the
file leaves out has the default that transformers gives it for that model type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lohan.errors import ConfigError, LohanError
from lohan.model.shapes import (
    BlockShape,
    ModelShape,
    check_heads,
    dit_block,
    gated_block,
    gpt_block,
    stacked,
)

MOST_LAYERS = 100_000


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of the causal language model, or the DiT of diffusers, that a config.json
    describes."""
    check_layers(config, name, ConfigError)
    kind = config.get("model_type") or config.get("_class_name")
    keys = _Keys(config, name)
    if isinstance(kind, str) and kind in GATED:
        return _gated_shape(keys, GATED[kind])
    if isinstance(kind, str) and kind in PLAIN:
        return PLAIN[kind](keys)
    raise ConfigError(
        f"{name}: model_type {kind!r} has no shape here; known are {', '.join(known_types())}; "
        "use one of these or a preset"
    )


def check_layers(config: Mapping[str, Any], name: object, kind: type[LohanError]) -> None:
    """Refuses a number of layers that nobody could list, let alone build."""
    for key, value in config.items():
        if (
            str(key).endswith(("layers", "layer"))
            and isinstance(value, int)
            and value > MOST_LAYERS
        ):
            raise kind(
                f"{name}: {key} is {value:.3g}, more than {MOST_LAYERS:,}; correct config.json"
            )
        if isinstance(value, dict):
            check_layers(value, name, kind)


def known_types() -> list[str]:
    return sorted((*GATED, *PLAIN))


@dataclass(frozen=True)
class _Keys:
    """A config.json with checked access; `name` is for messages."""

    config: Mapping[str, Any]
    name: str

    def number(self, *names: str, default: int | None = None) -> int:
        """A positive whole number under the first of these names that is there and not null."""
        for key in names:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"{self.name}: {key} is {value!r}, wants a whole number of at least 1; "
                    "correct config.json"
                )
            return value
        if default is None:
            raise ConfigError(f"{self.name}: config.json does not say {names[0]}; add it")
        return default

    def missing(self, key: str) -> bool:
        return key not in self.config

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.config.get(key)
        return default if value is None else bool(value)

    def share(self, key: str, *, default: float) -> float:
        value = self.config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(
                f"{self.name}: {key} is {value!r}, wants a number; correct config.json"
            )
        return float(value)


# -- Llama and its relatives ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Gated:
    """How a family differs from Llama, and its defaults; None: follows from other keys."""

    kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    qkv_bias: bool | None = False  # None: as `attention_bias` says, also for the output
    mlp_bias: bool = False  # the key counts
    qk_norm: bool = False
    sandwich: bool = False


GATED = {
    "llama": _Gated(qkv_bias=None, mlp_bias=True),
    "mistral": _Gated(kv_heads=8),
    "phi3": _Gated(),
    "qwen2": _Gated(kv_heads=32, qkv_bias=True),
    "qwen3": _Gated(kv_heads=32, head_dim=128, qkv_bias=None, qk_norm=True),
    "gemma": _Gated(kv_heads=16, head_dim=256, tied=True, qkv_bias=None),
    "gemma2": _Gated(kv_heads=4, head_dim=256, tied=True, qkv_bias=None, sandwich=True),
    "gemma3_text": _Gated(
        kv_heads=4, head_dim=256, tied=True, qkv_bias=None, qk_norm=True, sandwich=True
    ),
}


def _gated_shape(keys: _Keys, family: _Gated) -> ModelShape:
    h, vocabulary = keys.number("hidden_size"), keys.number("vocab_size")
    tied = keys.flag("tie_word_embeddings", default=family.tied)
    block = _gated_layer(keys, family, h)
    return ModelShape(
        name=keys.name, hidden=h, vocabulary=vocabulary,
        blocks=stacked(block, keys.number("num_hidden_layers")),
        embedding_parameters=vocabulary * h, head_parameters=0 if tied else vocabulary * h,
        tied=tied, resident_parameters=h,
    )  # fmt: skip


def _gated_layer(keys: _Keys, family: _Gated, h: int) -> BlockShape:
    heads, inner = keys.number("num_attention_heads"), keys.number("intermediate_size")
    kv_default = family.kv_heads if keys.missing("num_key_value_heads") else None
    head_default = family.head_dim if keys.missing("head_dim") else None
    head = keys.number("head_dim", default=head_default or h // heads)
    queries = heads * head
    kv = keys.number("num_key_value_heads", default=kv_default or heads) * head
    asked = keys.flag("attention_bias", default=False)
    bias = (queries + 2 * kv) if family.qkv_bias or (family.qkv_bias is None and asked) else 0
    bias += h if family.qkv_bias is None and asked else 0
    if family.mlp_bias and keys.flag("mlp_bias", default=False):
        bias += 2 * inner + h
    norms = (4 if family.sandwich else 2) * h + (2 * head if family.qk_norm else 0)
    return gated_block(
        parameters=h * (queries + 2 * kv) + queries * h + 3 * h * inner + bias + norms,
        hidden=h, queries=queries, keys=kv, inner=inner, qk_norm=family.qk_norm,
        sandwich=family.sandwich,
    )  # fmt: skip


# -- GPT-2 and its relatives ----------------------------------------------------------------------


def _gpt2_shape(keys: _Keys) -> ModelShape:
    h, layers = _gpt2_sizes(keys)
    inner, vocabulary = keys.number("n_inner", default=4 * h), keys.number("vocab_size")
    positions = keys.number("n_positions", "max_position_embeddings")
    block = gpt_block(
        parameters=4 * h * h + 4 * h + _mlp(h, inner) + 4 * h, hidden=h, inner=inner,
        dropout=keys.share("resid_pdrop", default=0.1) > 0, relu=_relu(keys, "gelu_new"),
    )  # fmt: skip
    tied = keys.flag("tie_word_embeddings", default=True)
    return ModelShape(
        name=keys.name, hidden=h, vocabulary=vocabulary, blocks=stacked(block, layers),
        embedding_parameters=(vocabulary + positions) * h,
        head_parameters=0 if tied else vocabulary * h, tied=tied, resident_parameters=2 * h,
    )  # fmt: skip


def _gptj_shape(keys: _Keys) -> ModelShape:
    h, layers = _gpt2_sizes(keys)
    inner, vocabulary = keys.number("n_inner", default=4 * h), keys.number("vocab_size")
    block = gpt_block(
        parameters=4 * h * h + _mlp(h, inner) + 2 * h, hidden=h, inner=inner, parallel=True,
        norms=1, dropout=keys.share("resid_pdrop", default=0.0) > 0,
        relu=_relu(keys, "gelu_new"),
    )  # fmt: skip
    tied = keys.flag("tie_word_embeddings", default=False)
    return ModelShape(
        name=keys.name, hidden=h, vocabulary=vocabulary, blocks=stacked(block, layers),
        embedding_parameters=vocabulary * h,
        head_parameters=vocabulary + (0 if tied else vocabulary * h), tied=tied,
        resident_parameters=2 * h,
    )  # fmt: skip


def _neox_shape(keys: _Keys) -> ModelShape:
    h, vocabulary = keys.number("hidden_size"), keys.number("vocab_size")
    check_heads(keys.name, keys.number("num_attention_heads"), h)
    inner = keys.number("intermediate_size")
    bias = 4 * h if keys.flag("attention_bias", default=True) else 0
    block = gpt_block(
        parameters=4 * h * h + bias + _mlp(h, inner) + 4 * h, hidden=h, inner=inner,
        parallel=keys.flag("use_parallel_residual", default=True),
        dropout=keys.share("hidden_dropout", default=0.0) > 0,
        relu=str(keys.config.get("hidden_act", "gelu")) == "relu",
    )  # fmt: skip
    tied = keys.flag("tie_word_embeddings", default=False)
    return ModelShape(
        name=keys.name, hidden=h, vocabulary=vocabulary,
        blocks=stacked(block, keys.number("num_hidden_layers")),
        embedding_parameters=vocabulary * h, head_parameters=0 if tied else vocabulary * h,
        tied=tied, resident_parameters=2 * h,
    )  # fmt: skip


def _opt_shape(keys: _Keys) -> ModelShape:
    h, vocabulary = keys.number("hidden_size"), keys.number("vocab_size")
    check_heads(keys.name, keys.number("num_attention_heads"), h)
    inner, word = keys.number("ffn_dim"), keys.number("word_embed_proj_dim", default=h)
    first = keys.flag("do_layer_norm_before", default=True)
    bias = keys.flag("enable_bias", default=True)
    norm = 2 * h if keys.flag("layer_norm_elementwise_affine", default=True) else 0
    block = gpt_block(
        parameters=4 * h * h + 2 * h * inner + (5 * h + inner if bias else 0) + 2 * norm,
        hidden=h, inner=inner, post_norm=not first, relu=_relu(keys, "relu"),
        dropout=keys.share("dropout", default=0.1) > 0,
    )  # fmt: skip
    tied = keys.flag("tie_word_embeddings", default=True)
    positions = (keys.number("max_position_embeddings") + 2) * h
    projections = 2 * word * h if word != h else 0
    last = first and not keys.flag("_remove_final_layer_norm", default=False)
    return ModelShape(
        name=keys.name, hidden=h, vocabulary=vocabulary,
        blocks=stacked(block, keys.number("num_hidden_layers")),
        embedding_parameters=vocabulary * word + positions + projections,
        head_parameters=0 if tied else vocabulary * word, tied=tied,
        resident_parameters=norm if last else 0,
    )  # fmt: skip


def _gpt2_sizes(keys: _Keys) -> tuple[int, int]:
    h = keys.number("n_embd", "hidden_size")
    check_heads(keys.name, keys.number("n_head", "num_attention_heads"), h)
    return h, keys.number("n_layer", "num_hidden_layers")


def _mlp(h: int, inner: int) -> int:
    return 2 * h * inner + inner + h


def _relu(keys: _Keys, default: str) -> bool:
    return str(keys.config.get("activation_function", default)) == "relu"


def _dit_shape(keys: _Keys) -> ModelShape:
    """As diffusers builds it: every block has embeddings of time and class of its own."""
    heads = keys.number("num_attention_heads", default=16)
    h = heads * keys.number("attention_head_dim", default=72)
    patch = keys.number("patch_size", default=2)
    given = keys.number("in_channels", default=4)
    made = keys.number("out_channels", default=given)
    tokens = (keys.number("sample_size", default=32) // patch) ** 2
    time = 256 * h + h + h * h + h
    classes = (keys.number("num_embeds_ada_norm", default=1000) + 1) * h
    block = dit_block(hidden=h, sample_tokens=tokens)
    pixels = patch * patch * made
    return ModelShape(
        name=keys.name, hidden=h, vocabulary=0,
        blocks=stacked(
            replace(block, parameters=block.parameters + time + classes),
            keys.number("num_layers", default=28),
        ),
        embedding_parameters=patch * patch * given * h + h,
        head_parameters=2 * h * h + 2 * h + pixels * h + pixels, sample_tokens=tokens,
    )  # fmt: skip


PLAIN: dict[str, Callable[[_Keys], ModelShape]] = {
    "gpt2": _gpt2_shape,
    "gptj": _gptj_shape,
    "gpt_neox": _neox_shape,
    "opt": _opt_shape,
    "DiTTransformer2DModel": _dit_shape,
}
