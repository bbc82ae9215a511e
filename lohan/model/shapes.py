"""A model as numbers: parameters, FLOPs and activations, for planner, cost model and simulator.

A shape is made from a preset, from a config.json, or from the traced blocks of a real model. A
multiply-add counts as two FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lohan.errors import ConfigError, LohanError


@dataclass(frozen=True)
class Activation:
    """A class of tensors in a block that backward needs, and the work that keeping them saves.

    Elements and FLOPs are per token. `flops` is the forward work that need not be repeated if the
    class is kept; for attention, `flops_per_context` is added to `flops` once for every token of
    the sequence. Masks and similar tensors are counted as the equivalent number of two-byte
    elements.
    """

    name: str
    elements: float
    flops: float
    flops_per_context: float = 0.0
    # True if the tensors are inside a position-wise part of the block. With tiles, only the
    # tensors of one tile exist at a time.
    tiled: bool = False

    def flops_at(self, seq: int) -> float:
        return self.flops + self.flops_per_context * seq

    def benefit_at(self, seq: int) -> float:
        """Return the offloading benefit at a sequence length: the FLOPs saved per element kept.

        Dividing it by the element size gives the benefit per byte.
        """
        return self.flops_at(seq) / self.elements


@dataclass(frozen=True)
class BlockShape:
    """The parameters, work and activations of one block.

    `activations` are all tensors that backward needs except the block's input, in the order in
    which forward computes them. `flops` includes the work for the block's output. The output is
    kept anyway as the input of the next block, so it belongs to no class.
    """

    name: str
    parameters: int
    input_elements: float  # Per token.
    flops: float  # Forward, per token.
    flops_per_context: float = 0.0
    activations: tuple[Activation, ...] = ()
    # For tiles: forward work per token that backward always repeats, for any choice of kept
    # activations, and the elements of one token of a tile.
    tile_flops: float = 0.0
    tile_elements: float = 0.0
    linear_ends: int = 0  # Sum of the input and output widths of all its linear layers.

    def adapter_parameters(self, rank: int) -> int:
        """Return the number of parameters of LoRA adapters on all linear layers of the block.

        `rank` is the rank of the adapters.
        """
        return rank * self.linear_ends

    def flops_at(self, seq: int) -> float:
        return self.flops + self.flops_per_context * seq

    @property
    def elements(self) -> float:
        """The elements that backward needs, including the input."""
        return self.input_elements + sum(part.elements for part in self.activations)

    def work(self, temporaries: float) -> float:
        """Return the approximate number of elements that backward uses besides the input.

        These are all activations, the temporaries (given as a multiple of the activations), and the
        output gradient.
        """
        inside = self.elements - self.input_elements
        return inside + self.elements * temporaries + self.input_elements

    @property
    def widest(self) -> float:
        """The approximate peak of forward without a graph, in elements.

        It consists of what the largest operation reads and writes, and of the block's output.
        """
        return self.input_elements + 2 * max((a.elements for a in self.activations), default=0.0)

    def scaled(self, factor: float, *, context: float) -> BlockShape:
        """Return the block with its work and sizes per token multiplied by `factor`.

        The attention work, `flops_per_context`, is multiplied by `context`.
        """
        return replace(
            self,
            input_elements=self.input_elements * factor,
            flops=self.flops * factor,
            tile_flops=self.tile_flops * factor,
            tile_elements=self.tile_elements * factor,
            flops_per_context=self.flops_per_context * context,
            activations=tuple(
                replace(
                    part,
                    elements=part.elements * factor,
                    flops=part.flops * factor,
                    flops_per_context=part.flops_per_context * context,
                )
                for part in self.activations
            ),
        )

    def recompute_flops_at(self, seq: int, kept: Collection[str] = ()) -> float:
        """Return the forward work to repeat if only the input and the `kept` classes are kept.

        Recomputation ends with the last tensor that backward needs.
        """
        repeated = sum(part.flops_at(seq) for part in self.activations if part.name not in kept)
        return repeated + self.tile_flops

    def in_tiles(self) -> BlockShape:
        """Return the block with its position-wise parts run in tiles.

        Of these parts, backward needs only the inputs. The weight gradients that the tiles
        accumulate are accounted for elsewhere.
        """
        inside = [part for part in self.activations if part.tiled]
        return replace(
            self,
            activations=tuple(part for part in self.activations if not part.tiled),
            tile_flops=sum(part.flops for part in inside),
            tile_elements=sum(part.elements for part in inside),
        )

    def by_benefit(self, seq: int) -> list[Activation]:
        """Return the classes in descending order of the benefit of keeping them."""
        return sorted(self.activations, key=lambda part: -part.benefit_at(seq))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    name: str
    hidden: int
    vocabulary: int  # 0: no token head.
    blocks: tuple[BlockShape, ...]
    embedding_parameters: int  # Including learned positions and projections of the embedding.
    head_parameters: int  # 0: none, or tied to the embedding.
    tied: bool = False
    resident_parameters: int = 0  # Norms and single vectors outside the blocks.
    # Tokens of one sample if the data determine it (images). 0: the sequence length.
    sample_tokens: int = 0
    temporaries: float = 1.0  # Temporaries of a block, as a fraction of its activations.
    # Rank of the adapters on all linear layers of the blocks. 0: all parameters are trained.
    lora: int = 0
    # Packing of the block weights under adapters; empty if they are not packed.
    base: str = ""

    @property
    def parameters(self) -> int:
        inside = sum(block.parameters for block in self.blocks)
        return inside + self.embedding_parameters + self.head_parameters + self.resident_parameters

    @property
    def head_flops(self) -> float:
        """The FLOPs of the token head's forward per token; 0 without a token head."""
        return 2.0 * self.hidden * self.vocabulary

    def flops_at(self, seq: int) -> float:
        """Return the FLOPs of one forward through blocks and head, per token."""
        return sum(block.flops_at(seq) for block in self.blocks) + self.head_flops


# -- Blocks of the known families as numbers: parameters, FLOPs and activations --------------------
#
# Attention is assumed to be flash attention: the scores are never stored, and a causal mask halves
# the work. Its log-sum-exp, two elements per head and token, is ignored. Norms and activation
# functions count as one operation each; their FLOPs are few, but they determine the order in which
# classes are kept.


NORM, POINTWISE, ADD = 8, 8, 1  # FLOPs per element.
MASK = 0.5  # In elements: one byte instead of two.


def gpt_block(
    *,
    parameters: int,
    hidden: int,
    inner: int,
    dropout: bool = True,
    parallel: bool = False,
    norms: int = 2,
    post_norm: bool = False,
    relu: bool = False,
) -> BlockShape:
    """Return a block with attention and a plain MLP.

    With `parallel`, both start from the block's input, with one or two `norms`. With `post_norm`,
    norms follow the residual sums. A ReLU needs only its result for backward.
    """
    h = hidden
    norm1, norm2 = Activation("norm1", h, NORM * h), Activation("norm2", h, NORM * h)
    projection = Activation("projection", h, 2 * h * h + ADD * h)
    attention = _attention(h, queries=h, keys=h)
    mlp = [Activation("fc1", inner, 2 * h * inner, tiled=True)]
    if relu:
        mlp[0] = replace(mlp[0], flops=2 * h * inner + ADD * inner)
    else:
        mlp.append(Activation("activation", inner, POINTWISE * inner, tiled=True))
    last = 2 * inner * h + ADD * h
    if parallel:
        last += 2 * h * h + ADD * h
        parts = [norm1, *attention, *((norm2,) if norms == 2 else ()), *mlp]
    elif post_norm:
        parts = [*attention, projection, norm1, *mlp, Activation("fc2", h, last)]
        last = NORM * h
    else:
        parts = [norm1, *attention, projection, norm2, *mlp]
    if dropout:
        parts.append(Activation("masks", 2 * MASK * h, 2 * ADD * h))
    return _block(parameters, h, parts, last, ends=6 * h + 2 * (h + inner) + 2 * h)


def gated_block(
    *,
    parameters: int,
    hidden: int,
    queries: int,
    keys: int,
    inner: int,
    qk_norm: bool = False,
    sandwich: bool = False,
) -> BlockShape:
    """Return a block with grouped-query attention and a gated MLP.

    With `sandwich`, attention and MLP are each preceded and followed by a norm.
    """
    h = hidden
    parts = [
        Activation("norm1", h, NORM * h),
        *_attention(h, queries=queries, keys=keys, qk_norm=qk_norm),
        Activation("projection", h, 2 * queries * h + ADD * h),
        *((Activation("residual", h, NORM * h),) if sandwich else ()),
        Activation("norm2", h, NORM * h),
        Activation("gate", inner, 2 * h * inner, tiled=True),
        Activation("up", inner, 2 * h * inner, tiled=True),
        Activation("activation", inner, POINTWISE * inner, tiled=True),
        Activation("product", inner, ADD * inner, tiled=True),
    ]
    last = 2 * inner * h + ADD * h
    if sandwich:
        parts.append(Activation("down", h, last))
        last = NORM * h
    ends = 2 * (h + queries) + 2 * (h + keys) + 3 * (h + inner)
    return _block(parameters, h, parts, last, ends=ends)


def experts_block(
    *,
    parameters: int,
    hidden: int,
    queries: int,
    keys: int,
    inner: int,
    experts: int,
    active: int,
    qk_norm: bool = False,
    clamped: bool = False,
) -> BlockShape:
    """Return a block with grouped-query attention and a mixture of gated experts.

    A router sends each token to `active` of `experts` MLPs, each `inner` wide. The products of all
    experts are assumed to be as efficient as one product of the same size. With `clamped`, the gate
    and up projections are limited as in gpt-oss, and backward needs three more tensors.
    """
    h, routed = hidden, active * inner
    parts = [
        Activation("norm1", h, NORM * h),
        *_attention(h, queries=queries, keys=keys, qk_norm=qk_norm),
        Activation("projection", h, 2 * queries * h + ADD * h),
        Activation("norm2", h, NORM * h),
        Activation("router", experts, 2 * h * experts + POINTWISE * experts),
        Activation("routed", active * h, ADD * active * h),
        Activation("gate and up", 2 * routed, 4 * active * h * inner),
        *((Activation("clamped", 3 * routed, 3 * ADD * routed),) if clamped else ()),
        Activation("activation", routed, POINTWISE * routed),
        Activation("product", routed, ADD * routed),
        Activation("down", active * h, 2 * active * inner * h),
    ]
    # Adapters on linear layers leave out the router and the experts, which are plain tensors.
    ends = 2 * (h + queries) + 2 * (h + keys)
    return _block(parameters, h, parts, ADD * (active + 1) * h, ends=ends)


def dit_block(*, hidden: int, sample_tokens: int) -> BlockShape:
    """Return a block of a diffusion transformer.

    It is a GPT block whose norms are scaled and shifted, and whose branches are gated. Six vectors,
    which are computed once per sample, contain the scales, shifts and gates. The gradient of a gate
    needs its operand, so the outputs of both branches are needed.
    """
    h = hidden
    vectors = (12 * h * h + POINTWISE * h) / sample_tokens
    parts = [
        Activation("modulation", 6 * h / sample_tokens, vectors),
        Activation("norm1", h, NORM * h),
        Activation("shifted1", h, 2 * ADD * h),
        *_attention(h, queries=h, keys=h, causal=False),
        Activation("projection", h, 2 * h * h),
        Activation("residual", h, 2 * ADD * h),
        Activation("norm2", h, NORM * h),
        Activation("shifted2", h, 2 * ADD * h),
        Activation("fc1", 4 * h, 8 * h * h, tiled=True),
        Activation("activation", 4 * h, POINTWISE * 4 * h, tiled=True),
        Activation("fc2", h, 8 * h * h),
    ]
    return _block(18 * h * h + 15 * h, h, parts, 2 * ADD * h, ends=25 * h)


def _attention(
    hidden: int, *, queries: int, keys: int, causal: bool = True, qk_norm: bool = False
) -> list[Activation]:
    width, rotated = queries + 2 * keys, queries + keys
    return [
        Activation("qkv", width, 2 * hidden * width),
        *((Activation("qk norm", rotated, NORM * rotated),) if qk_norm else ()),
        Activation("attention", queries, 0, (2 if causal else 4) * queries),
    ]


def _block(
    parameters: int, hidden: int, parts: Sequence[Activation], last: float, *, ends: int
) -> BlockShape:
    """Return a block made of `parts`.

    `last` is the number of FLOPs that compute the block's output, and `ends` is the sum of the
    input and output widths of its linear layers.
    """
    return BlockShape(
        name="block",
        parameters=parameters,
        input_elements=hidden,
        flops=sum(part.flops for part in parts) + last,
        flops_per_context=sum(part.flops_per_context for part in parts),
        activations=tuple(parts),
        linear_ends=ends,
    )


def stacked(block: BlockShape, layers: int) -> tuple[BlockShape, ...]:
    return tuple(replace(block, name=f"layers.{index}") for index in range(layers))


def gpt_shape(
    layers: int,
    heads: int,
    hidden: int,
    *,
    vocabulary: int = 50257,
    positions: int = 1024,
    name: str = "gpt",
) -> ModelShape:
    """Return the GPT of the paper: learned positions, biases, dropout, tied head.

    Its `temporaries` are 0, in agreement with the published results.
    """
    check_heads(name, heads, hidden)
    h = hidden
    block = gpt_block(parameters=12 * h * h + 13 * h, hidden=h, inner=4 * h)
    return ModelShape(
        name=name,
        hidden=h,
        vocabulary=vocabulary,
        blocks=stacked(block, layers),
        embedding_parameters=(vocabulary + positions) * h,
        head_parameters=0,
        tied=True,
        resident_parameters=2 * h,
        temporaries=0.0,
    )


def dit_shape(
    layers: int,
    heads: int,
    hidden: int,
    *,
    image: int = 512,
    patch: int = 2,
    classes: int = 1000,
    name: str = "dit",
) -> ModelShape:
    """Return a diffusion transformer on latents with 1/8 of the image size and four channels.

    This includes its embeddings (patch, time, class) and its final layer, which predicts noise and
    variance.
    """
    check_heads(name, heads, hidden)
    h, pixels = hidden, 4 * patch * patch
    tokens = (image // 8 // patch) ** 2
    time = 256 * h + h + h * h + h
    return ModelShape(
        name=name,
        hidden=h,
        vocabulary=0,
        blocks=stacked(dit_block(hidden=h, sample_tokens=tokens), layers),
        embedding_parameters=pixels * h + h + time + (classes + 1) * h,
        head_parameters=2 * h * h + 2 * h + 2 * pixels * h + 2 * pixels,
        sample_tokens=tokens,
        temporaries=0.0,
    )


def check_heads(name: str, heads: int, hidden: int) -> None:
    if heads < 1 or hidden % heads:
        raise ConfigError(
            f"{name}: hidden size {hidden} does not divide by {heads} attention heads; correct one"
        )


# -- From a Hugging Face config.json, without torch or transformers --------------------------------
#
# Parameter counts are those of the model that transformers builds from the same file. A missing key
# has the default that transformers uses for that model type.


# The deepest published models have this many layers. Planning for more takes minutes.
MOST_LAYERS = 1_000


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of the causal language model or diffusers DiT of a config.json."""
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
    """Raise an error of type `kind` if the config has more than MOST_LAYERS layers."""
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
    """A config.json with checked access to its keys; `name` is used in messages."""

    config: Mapping[str, Any]
    name: str

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the positive integer under the first key in `names` that is not null or missing.

        If all of them are, return `default`. Without a default, raise ConfigError.
        """
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
class _Experts:
    """The experts of a model family: defaults for keys that its config.json leaves out."""

    count: int
    active: int
    inner: int = 0  # Default of `moe_intermediate_size`; 0 if the key is `intermediate_size`.
    biases: bool = False  # Biases of experts and router, and one attention sink per head.


@dataclass(frozen=True)
class _Gated:
    """The differences of a family from Llama, and its defaults.

    None: the value is derived from other keys.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    # Whether query, key and value have a bias. None: the key `attention_bias` decides, also for the
    # output projection.
    qkv_bias: bool | None = False
    attention_bias: bool = False  # Default of the key `attention_bias`.
    mlp_bias: bool = False  # True if the key `mlp_bias` is honoured.
    qk_norm: bool = False
    sandwich: bool = False
    experts: _Experts | None = None


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
    "mixtral": _Gated(kv_heads=8, experts=_Experts(8, 2)),
    "qwen3_moe": _Gated(
        kv_heads=4, qkv_bias=None, qk_norm=True, experts=_Experts(128, 8, inner=768)
    ),
    "gpt_oss": _Gated(
        kv_heads=8,
        head_dim=64,
        qkv_bias=None,
        attention_bias=True,
        experts=_Experts(128, 4, biases=True),
    ),
}


def _gated_shape(keys: _Keys, family: _Gated) -> ModelShape:
    h, vocabulary = keys.number("hidden_size"), keys.number("vocab_size")
    tied = keys.flag("tie_word_embeddings", default=family.tied)
    layers = keys.number("num_hidden_layers")
    if family.experts is not None:
        _refuse_dense_layers(keys)
    return ModelShape(
        name=keys.name,
        hidden=h,
        vocabulary=vocabulary,
        blocks=stacked(_gated_layer(keys, family, h), layers),
        embedding_parameters=vocabulary * h,
        head_parameters=0 if tied else vocabulary * h,
        tied=tied,
        resident_parameters=h,
    )


def _gated_layer(keys: _Keys, family: _Gated, h: int) -> BlockShape:
    heads = keys.number("num_attention_heads")
    kv_default = family.kv_heads if keys.missing("num_key_value_heads") else None
    head_default = family.head_dim if keys.missing("head_dim") else None
    head = keys.number("head_dim", default=head_default or h // heads)
    queries = heads * head
    kv = keys.number("num_key_value_heads", default=kv_default or heads) * head
    has_bias = keys.flag("attention_bias", default=family.attention_bias)
    bias = (queries + 2 * kv) if family.qkv_bias or (family.qkv_bias is None and has_bias) else 0
    bias += h if family.qkv_bias is None and has_bias else 0
    norms = (4 if family.sandwich else 2) * h + (2 * head if family.qk_norm else 0)
    attention = h * (queries + 2 * kv) + queries * h + bias + norms
    if family.experts is not None:
        mixture = family.experts
        wide = "moe_intermediate_size" if mixture.inner else "intermediate_size"
        inner = keys.number(wide, default=mixture.inner or None)
        count = keys.number("num_local_experts", "num_experts", default=mixture.count)
        biases = count * (2 * inner + h + 1) + heads if mixture.biases else 0
        return experts_block(
            parameters=attention + count * (3 * h * inner + h) + biases,
            hidden=h,
            queries=queries,
            keys=kv,
            inner=inner,
            experts=count,
            active=keys.number("num_experts_per_tok", default=mixture.active),
            qk_norm=family.qk_norm,
            clamped=mixture.biases,
        )
    inner = keys.number("intermediate_size")
    if family.mlp_bias and keys.flag("mlp_bias", default=False):
        attention += 2 * inner + h
    return gated_block(
        parameters=attention + 3 * h * inner,
        hidden=h,
        queries=queries,
        keys=kv,
        inner=inner,
        qk_norm=family.qk_norm,
        sandwich=family.sandwich,
    )


def _refuse_dense_layers(keys: _Keys) -> None:
    """Raise an error if some layers have a plain MLP in place of experts."""
    if keys.config.get("mlp_only_layers") or keys.number("decoder_sparse_step", default=1) > 1:
        raise ConfigError(
            f"{keys.name}: has layers with experts and layers without, for which there is no shape "
            "here; plan with the model's folder and `lohan train --dry-run`"
        )


# -- GPT-2 and its relatives ----------------------------------------------------------------------


def _gpt2_shape(keys: _Keys) -> ModelShape:
    h, layers = _gpt2_sizes(keys)
    inner, vocabulary = keys.number("n_inner", default=4 * h), keys.number("vocab_size")
    positions = keys.number("n_positions", "max_position_embeddings")
    block = gpt_block(
        parameters=4 * h * h + 4 * h + _mlp(h, inner) + 4 * h,
        hidden=h,
        inner=inner,
        dropout=keys.share("resid_pdrop", default=0.1) > 0,
        relu=_relu(keys, "gelu_new"),
    )
    tied = keys.flag("tie_word_embeddings", default=True)
    return ModelShape(
        name=keys.name,
        hidden=h,
        vocabulary=vocabulary,
        blocks=stacked(block, layers),
        embedding_parameters=(vocabulary + positions) * h,
        head_parameters=0 if tied else vocabulary * h,
        tied=tied,
        resident_parameters=2 * h,
    )


def _gptj_shape(keys: _Keys) -> ModelShape:
    h, layers = _gpt2_sizes(keys)
    inner, vocabulary = keys.number("n_inner", default=4 * h), keys.number("vocab_size")
    block = gpt_block(
        parameters=4 * h * h + _mlp(h, inner) + 2 * h,
        hidden=h,
        inner=inner,
        parallel=True,
        norms=1,
        dropout=keys.share("resid_pdrop", default=0.0) > 0,
        relu=_relu(keys, "gelu_new"),
    )
    tied = keys.flag("tie_word_embeddings", default=False)
    return ModelShape(
        name=keys.name,
        hidden=h,
        vocabulary=vocabulary,
        blocks=stacked(block, layers),
        embedding_parameters=vocabulary * h,
        head_parameters=vocabulary + (0 if tied else vocabulary * h),
        tied=tied,
        resident_parameters=2 * h,
    )


def _neox_shape(keys: _Keys) -> ModelShape:
    h, vocabulary = keys.number("hidden_size"), keys.number("vocab_size")
    check_heads(keys.name, keys.number("num_attention_heads"), h)
    inner = keys.number("intermediate_size")
    bias = 4 * h if keys.flag("attention_bias", default=True) else 0
    block = gpt_block(
        parameters=4 * h * h + bias + _mlp(h, inner) + 4 * h,
        hidden=h,
        inner=inner,
        parallel=keys.flag("use_parallel_residual", default=True),
        dropout=keys.share("hidden_dropout", default=0.0) > 0,
        relu=str(keys.config.get("hidden_act", "gelu")) == "relu",
    )
    tied = keys.flag("tie_word_embeddings", default=False)
    return ModelShape(
        name=keys.name,
        hidden=h,
        vocabulary=vocabulary,
        blocks=stacked(block, keys.number("num_hidden_layers")),
        embedding_parameters=vocabulary * h,
        head_parameters=0 if tied else vocabulary * h,
        tied=tied,
        resident_parameters=2 * h,
    )


def _opt_shape(keys: _Keys) -> ModelShape:
    h, vocabulary = keys.number("hidden_size"), keys.number("vocab_size")
    check_heads(keys.name, keys.number("num_attention_heads"), h)
    inner, word = keys.number("ffn_dim"), keys.number("word_embed_proj_dim", default=h)
    first = keys.flag("do_layer_norm_before", default=True)
    bias = keys.flag("enable_bias", default=True)
    norm = 2 * h if keys.flag("layer_norm_elementwise_affine", default=True) else 0
    block = gpt_block(
        parameters=4 * h * h + 2 * h * inner + (5 * h + inner if bias else 0) + 2 * norm,
        hidden=h,
        inner=inner,
        post_norm=not first,
        relu=_relu(keys, "relu"),
        dropout=keys.share("dropout", default=0.1) > 0,
    )
    tied = keys.flag("tie_word_embeddings", default=True)
    positions = (keys.number("max_position_embeddings") + 2) * h
    projections = 2 * word * h if word != h else 0
    last = first and not keys.flag("_remove_final_layer_norm", default=False)
    return ModelShape(
        name=keys.name,
        hidden=h,
        vocabulary=vocabulary,
        blocks=stacked(block, keys.number("num_hidden_layers")),
        embedding_parameters=vocabulary * word + positions + projections,
        head_parameters=0 if tied else vocabulary * word,
        tied=tied,
        resident_parameters=norm if last else 0,
    )


def _gpt2_sizes(keys: _Keys) -> tuple[int, int]:
    h = keys.number("n_embd", "hidden_size")
    check_heads(keys.name, keys.number("n_head", "num_attention_heads"), h)
    return h, keys.number("n_layer", "num_hidden_layers")


def _mlp(h: int, inner: int) -> int:
    return 2 * h * inner + inner + h


def _relu(keys: _Keys, default: str) -> bool:
    return str(keys.config.get("activation_function", default)) == "relu"


def _dit_shape(keys: _Keys) -> ModelShape:
    """Return the DiT as diffusers builds it: every block has its own time and class embeddings."""
    heads = keys.number("num_attention_heads", default=16)
    h = heads * keys.number("attention_head_dim", default=72)
    patch = keys.number("patch_size", default=2)
    channels = keys.number("in_channels", default=4)
    out_channels = keys.number("out_channels", default=channels)
    tokens = (keys.number("sample_size", default=32) // patch) ** 2
    time = 256 * h + h + h * h + h
    classes = (keys.number("num_embeds_ada_norm", default=1000) + 1) * h
    block = dit_block(hidden=h, sample_tokens=tokens)
    pixels = patch * patch * out_channels
    return ModelShape(
        name=keys.name,
        hidden=h,
        vocabulary=0,
        blocks=stacked(
            replace(block, parameters=block.parameters + time + classes),
            keys.number("num_layers", default=28),
        ),
        embedding_parameters=patch * patch * channels * h + h,
        head_parameters=2 * h * h + 2 * h + pixels * h + pixels,
        sample_tokens=tokens,
    )


PLAIN: dict[str, Callable[[_Keys], ModelShape]] = {
    "gpt2": _gpt2_shape,
    "gptj": _gptj_shape,
    "gpt_neox": _neox_shape,
    "opt": _opt_shape,
    "DiTTransformer2DModel": _dit_shape,
}
