"""Small models of every architecture, modules that do unusual things, and calls of one block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from lohan.capture.saved_call import SavedCall
from lohan.capture.slicing import find_cut

# -- architectures, each with data and its own loss ------------------------------------------------

ARCHITECTURE_BATCH = 4
ARCHITECTURE_VOCAB = 96
TEXT_SIZES = {
    "vocab_size": ARCHITECTURE_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE_SIZES = {**TEXT_SIZES, "tie_word_embeddings": False, "output_router_logits": True}

Batch = dict[str, Any]


class Denoiser(nn.Module):
    """Any model of diffusers with the loss of noise prediction."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, noise: torch.Tensor, **inputs: Any) -> torch.Tensor:
        predicted = self.model(**inputs, return_dict=False)[0]
        return nn.functional.mse_loss(predicted[:, : noise.shape[1]], noise)


def causal(config: Any) -> nn.Module:
    return hf.AutoModelForCausalLM.from_config(config)


def mixtral() -> nn.Module:
    return causal(
        hf.MixtralConfig(
            **MOE_SIZES, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.1
        )
    )


def qwen3_moe() -> nn.Module:
    sizes = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
    return causal(hf.Qwen3MoeConfig(**MOE_SIZES, **sizes, head_dim=8, router_aux_loss_coef=0.1))


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=ARCHITECTURE_VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def bert() -> nn.Module:
    sizes = {key: value for key, value in TEXT_SIZES.items() if key != "num_key_value_heads"}
    return hf.BertForSequenceClassification(
        hf.BertConfig(
            **sizes, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    )


VISION_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


def vit() -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            **VISION_SIZES, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    )


def llava() -> nn.Module:
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**VISION_SIZES),
            text_config=hf.LlamaConfig(**TEXT_SIZES, tie_word_embeddings=False),
            image_token_index=3,
            vision_feature_layer=-2,
            image_seq_length=16,
        )
    )


def qwen_vl() -> nn.Module:
    return hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(
            text_config={
                **TEXT_SIZES,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [1, 1, 2],
                    "rope_theta": 1e4,
                },
                "tie_word_embeddings": False,
            },
            vision_config={
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 4,
                "temporal_patch_size": 2,
            },
            image_token_id=3,
            vision_start_token_id=4,
            vision_end_token_id=5,
            video_token_id=6,
        )
    )


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return Denoiser(
        DiTTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=3,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=1000,
            dropout=0.0,
        )
    )


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return Denoiser(
        FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=16,
            pooled_projection_dim=12,
            axes_dims_rope=(2, 2, 4),
            guidance_embeds=True,
        )
    )


def sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return Denoiser(
        SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=16,
            caption_projection_dim=32,
            pooled_projection_dim=12,
            out_channels=4,
            pos_embed_max_size=8,
        )
    )


def text_batch(g: torch.Generator) -> Batch:
    ids = torch.randint(7, ARCHITECTURE_VOCAB, (ARCHITECTURE_BATCH, 12), generator=g)
    labels = ids.clone()
    labels[:, :3] = -100
    mask = torch.ones_like(ids)
    mask[1, 9:], labels[1, 9:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def pair_batch(g: torch.Generator) -> Batch:
    batch = text_batch(g)
    return {
        **batch,
        "labels": torch.randint(7, ARCHITECTURE_VOCAB, (ARCHITECTURE_BATCH, 6), generator=g),
    }


def class_batch(g: torch.Generator) -> Batch:
    return {**text_batch(g), "labels": torch.randint(0, 3, (ARCHITECTURE_BATCH,), generator=g)}


def image_batch(g: torch.Generator) -> Batch:
    pixels = torch.randn(ARCHITECTURE_BATCH, 3, 16, 16, generator=g)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(0, 3, (ARCHITECTURE_BATCH,), generator=g),
    }


def llava_batch(g: torch.Generator) -> Batch:
    ids = torch.randint(7, ARCHITECTURE_VOCAB, (ARCHITECTURE_BATCH, 24), generator=g)
    ids[:, 2:18] = 3
    labels = ids.masked_fill(ids == 3, -100)
    pixels = torch.randn(ARCHITECTURE_BATCH, 3, 16, 16, generator=g)
    return {"input_ids": ids, "pixel_values": pixels, "labels": labels}


def qwen_vl_batch(g: torch.Generator) -> Batch:
    """Each sample has an image of 4 x 4 patches, four tokens after merging."""
    ids = torch.randint(7, ARCHITECTURE_VOCAB, (ARCHITECTURE_BATCH, 14), generator=g)
    ids[:, 1], ids[:, 2:6], ids[:, 6] = 4, 3, 5
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == 3).int(),
        "pixel_values": torch.randn(ARCHITECTURE_BATCH * 16, 3 * 2 * 4 * 4, generator=g),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ARCHITECTURE_BATCH),
        "labels": ids.masked_fill((ids >= 3) & (ids <= 5), -100),
    }


def latent_batch(g: torch.Generator) -> Batch:
    return {
        "hidden_states": torch.randn(ARCHITECTURE_BATCH, 4, 8, 8, generator=g),
        "timestep": torch.randint(0, 1000, (ARCHITECTURE_BATCH,), generator=g),
        "class_labels": torch.randint(0, 1000, (ARCHITECTURE_BATCH,), generator=g),
        "noise": torch.randn(ARCHITECTURE_BATCH, 4, 8, 8, generator=g),
    }


def flux_batch(g: torch.Generator) -> Batch:
    """Return a batch with as many image tokens as samples, so that sizes are ambiguous."""
    return {
        "hidden_states": torch.randn(ARCHITECTURE_BATCH, ARCHITECTURE_BATCH, 4, generator=g),
        "encoder_hidden_states": torch.randn(ARCHITECTURE_BATCH, 6, 16, generator=g),
        "pooled_projections": torch.randn(ARCHITECTURE_BATCH, 12, generator=g),
        "timestep": torch.rand(ARCHITECTURE_BATCH, generator=g),
        "guidance": torch.full((ARCHITECTURE_BATCH,), 3.5),
        "img_ids": torch.arange(ARCHITECTURE_BATCH * 3).reshape(ARCHITECTURE_BATCH, 3).float(),
        "txt_ids": torch.zeros(6, 3),
        "noise": torch.randn(ARCHITECTURE_BATCH, ARCHITECTURE_BATCH, 4, generator=g),
    }


def sd3_batch(g: torch.Generator) -> Batch:
    return {
        "hidden_states": torch.randn(ARCHITECTURE_BATCH, 4, 8, 8, generator=g),
        "encoder_hidden_states": torch.randn(ARCHITECTURE_BATCH, 6, 16, generator=g),
        "pooled_projections": torch.randn(ARCHITECTURE_BATCH, 12, generator=g),
        "timestep": torch.randint(0, 1000, (ARCHITECTURE_BATCH,), generator=g).float(),
        "noise": torch.randn(ARCHITECTURE_BATCH, 4, 8, 8, generator=g),
    }


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch]]] = {
    "dit": (dit, latent_batch),
    "flux": (flux, flux_batch),
    "sd3": (sd3, sd3_batch),
    "mixtral": (mixtral, text_batch),
    "qwen3-moe": (qwen3_moe, text_batch),
    "t5": (t5, pair_batch),
    "bert": (bert, class_batch),
    "vit": (vit, image_batch),
    "llava": (llava, llava_batch),
    "qwen-vl": (qwen_vl, qwen_vl_batch),
}


def architecture_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = ARCHITECTURES[kind][0]().train()
    with torch.no_grad():  # gates that start as zero would hide what is behind them
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def architecture_batches(kind: str, steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [ARCHITECTURES[kind][1](generator) for _ in range(steps)]


KEY_BIASES = ("k_proj.bias", "to_k.bias", "key.bias")  # their gradient is rounding noise alone


def without_noise(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: w for name, w in weights.items() if not name.endswith(KEY_BIASES)}


# -- modules that do unusual things, and what they must not do -------------------------------------

MODULE_WIDTH = 12


class StepOutput(nn.Module):
    """x + tanh(Wx)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MODULE_WIDTH, MODULE_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Conditioned(nn.Module):
    """A block with two streams, a conditioning vector, a shared table and a mode.

    It takes a dict and returns a dict and a tuple.
    """

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Linear(MODULE_WIDTH, MODULE_WIDTH),
            nn.Linear(MODULE_WIDTH, MODULE_WIDTH),
        )
        self.scale = nn.Linear(MODULE_WIDTH, MODULE_WIDTH)
        self.gate = gate

    def forward(
        self,
        streams: dict[str, torch.Tensor],
        mode: str,
        *,
        condition: torch.Tensor,
        table: tuple[torch.Tensor, torch.Tensor],
        weight: torch.Tensor,
        options: Any = None,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, str]:
        x, y = streams["x"], streams["y"]
        scale = 1 + self.scale(condition)[:, None]
        x = x + self.gate * torch.tanh(self.one(x * scale) + table[0]) * weight[:, None, None]
        y = y + torch.tanh(self.two(y)) * x.mean(1, keepdim=True) + table[1]
        return {"x": x, "y": y}, (x * y.mean(1, keepdim=True)).mean((1, 2)), mode


class Streams(nn.Module):
    """Two lists of different blocks, one of them nested, around shared conditioning.

    There are as many tokens as samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(MODULE_WIDTH, MODULE_WIDTH)
        self.condition = nn.Sequential(nn.Linear(MODULE_WIDTH, MODULE_WIDTH), nn.Tanh())
        self.blocks = nn.ModuleList(Conditioned(0.5 + n) for n in range(3))
        self.nested = nn.ModuleList(
            nn.ModuleList([StepOutput(), nn.Identity(), StepOutput()]) for _ in "ab"
        )
        self.table = nn.Parameter(0.1 * torch.randn(4, MODULE_WIDTH))

    def forward(self, x: torch.Tensor, c: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        streams = {"x": self.entry(x), "y": self.entry(x.flip(1))}
        condition, extra = self.condition(c), torch.zeros(())
        table = (self.table, self.table.sin())
        for block in self.blocks:
            streams, each, mode = block(
                streams, "plain", condition=condition, table=table, weight=weight
            )
            assert mode == "plain"
            extra = extra + (each * weight).mean()
        hidden = streams["x"] + streams["y"]
        for first, none, second in self.nested:
            hidden = second(none(first(hidden)))
        return hidden.square().mean() + extra

    @staticmethod
    def data(steps: int) -> list[dict[str, torch.Tensor]]:
        g = torch.Generator().manual_seed(3)
        return [
            {
                "x": torch.randn(4, 4, MODULE_WIDTH, generator=g),
                "c": torch.randn(4, MODULE_WIDTH, generator=g),
                "weight": torch.rand(4, generator=g),
            }
            for _ in range(steps)
        ]


class Plain(nn.Module):
    """Blocks of one kind between two projections; `outside` names what is read outside of them."""

    def __init__(self, block: Any = StepOutput, *, outside: str = "", inner: Any = None) -> None:
        super().__init__()
        self.entry = nn.Linear(MODULE_WIDTH, MODULE_WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.exit = nn.Linear(MODULE_WIDTH, 2)
        self.outside = outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(x)
        for block in self.blocks:
            hidden = block(hidden)
        if self.outside == "module":
            hidden = hidden + self.blocks[1].linear(x)
        if self.outside == "parameter":
            hidden = hidden @ self.entry.weight.T
        return self.exit(hidden).square().mean()

    @staticmethod
    def data(steps: int, *, samples: int = 4) -> list[dict[str, torch.Tensor]]:
        g = torch.Generator().manual_seed(3)
        return [{"x": torch.randn(samples, 5, MODULE_WIDTH, generator=g)} for _ in range(steps)]


class Centred(StepOutput):
    """Takes half the mean over all samples away: they mix, and no shape shows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) - 0.5 * x.mean(0)


# -- calls of one block, slice by slice ------------------------------------------------------------

BLOCK_SEQ = 24
BLOCK_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "use_cache": False,
}
BLOCK_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**BLOCK_SIZES),
    "qwen3": lambda: Qwen3Config(**BLOCK_SIZES, head_dim=16),
    "gpt2": lambda: GPT2Config(  # dropout as it comes: 0.1, in attention too
        n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=BLOCK_SEQ, use_cache=False
    ),
}


def block_call(model: nn.Module, block: nn.Module, batch: dict[str, Any]) -> SavedCall:
    """Return the call that the model makes of one of its modules."""
    calls: list[SavedCall] = []
    handle = block.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(SavedCall("block", args, kwargs)), with_kwargs=True
    )
    with torch.random.fork_rng(devices=[]):
        model(**batch)
    handle.remove()
    calls[0].detach()
    calls[0].cut = find_cut(block, calls[0], block, values=True)
    return calls[0]


def second_block(model: nn.Module) -> nn.Module:
    lists = (child for child in model.modules() if isinstance(child, nn.ModuleList))
    return next(lists)[1]


def small_block(
    kind: str, *, batch: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, SavedCall]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(BLOCK_CONFIGS[kind]()).to(dtype).train()
    block = second_block(model)
    return block, block_call(model, block, {"input_ids": torch.randint(0, 61, (batch, BLOCK_SEQ))})
