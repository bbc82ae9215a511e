"""Small models of every supported architecture, each with data and its own loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

BATCH = 4
VOCAB = 96
TEXT = {
    "vocab_size": VOCAB,
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
MOE = {**TEXT, "tie_word_embeddings": False, "output_router_logits": True}

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
            **MOE, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.1
        )
    )


def qwen3_moe() -> nn.Module:
    sizes = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
    return causal(hf.Qwen3MoeConfig(**MOE, **sizes, head_dim=8, router_aux_loss_coef=0.1))


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCAB,
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
    sizes = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
    return hf.BertForSequenceClassification(
        hf.BertConfig(
            **sizes, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    )


VISION = {
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
            **VISION, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    )


def llava() -> nn.Module:
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**VISION),
            text_config=hf.LlamaConfig(**TEXT, tie_word_embeddings=False),
            image_token_index=3,
            vision_feature_layer=-2,
            image_seq_length=16,
        )
    )


def qwen_vl() -> nn.Module:
    return hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(
            text_config={
                **TEXT,
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
    ids = torch.randint(7, VOCAB, (BATCH, 12), generator=g)
    labels = ids.clone()
    labels[:, :3] = -100
    mask = torch.ones_like(ids)
    mask[1, 9:], labels[1, 9:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def pair_batch(g: torch.Generator) -> Batch:
    batch = text_batch(g)
    return {**batch, "labels": torch.randint(7, VOCAB, (BATCH, 6), generator=g)}


def class_batch(g: torch.Generator) -> Batch:
    return {**text_batch(g), "labels": torch.randint(0, 3, (BATCH,), generator=g)}


def image_batch(g: torch.Generator) -> Batch:
    pixels = torch.randn(BATCH, 3, 16, 16, generator=g)
    return {"pixel_values": pixels, "labels": torch.randint(0, 3, (BATCH,), generator=g)}


def llava_batch(g: torch.Generator) -> Batch:
    ids = torch.randint(7, VOCAB, (BATCH, 24), generator=g)
    ids[:, 2:18] = 3
    labels = ids.masked_fill(ids == 3, -100)
    pixels = torch.randn(BATCH, 3, 16, 16, generator=g)
    return {"input_ids": ids, "pixel_values": pixels, "labels": labels}


def qwen_vl_batch(g: torch.Generator) -> Batch:
    """Each sample has an image of 4 x 4 patches, four tokens after merging."""
    ids = torch.randint(7, VOCAB, (BATCH, 14), generator=g)
    ids[:, 1], ids[:, 2:6], ids[:, 6] = 4, 3, 5
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == 3).int(),
        "pixel_values": torch.randn(BATCH * 16, 3 * 2 * 4 * 4, generator=g),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        "labels": ids.masked_fill((ids >= 3) & (ids <= 5), -100),
    }


def latent_batch(g: torch.Generator) -> Batch:
    return {
        "hidden_states": torch.randn(BATCH, 4, 8, 8, generator=g),
        "timestep": torch.randint(0, 1000, (BATCH,), generator=g),
        "class_labels": torch.randint(0, 1000, (BATCH,), generator=g),
        "noise": torch.randn(BATCH, 4, 8, 8, generator=g),
    }


def flux_batch(g: torch.Generator) -> Batch:
    """Return a batch with as many image tokens as samples, so that sizes are ambiguous."""
    return {
        "hidden_states": torch.randn(BATCH, BATCH, 4, generator=g),
        "encoder_hidden_states": torch.randn(BATCH, 6, 16, generator=g),
        "pooled_projections": torch.randn(BATCH, 12, generator=g),
        "timestep": torch.rand(BATCH, generator=g),
        "guidance": torch.full((BATCH,), 3.5),
        "img_ids": torch.arange(BATCH * 3).reshape(BATCH, 3).float(),
        "txt_ids": torch.zeros(6, 3),
        "noise": torch.randn(BATCH, BATCH, 4, generator=g),
    }


def sd3_batch(g: torch.Generator) -> Batch:
    return {
        "hidden_states": torch.randn(BATCH, 4, 8, 8, generator=g),
        "encoder_hidden_states": torch.randn(BATCH, 6, 16, generator=g),
        "pooled_projections": torch.randn(BATCH, 12, generator=g),
        "timestep": torch.randint(0, 1000, (BATCH,), generator=g).float(),
        "noise": torch.randn(BATCH, 4, 8, 8, generator=g),
    }


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch]]] = {
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


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = KINDS[kind][0]().train()
    with torch.no_grad():  # gates that start as zero would hide what is behind them
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def data_of(kind: str, steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [KINDS[kind][1](generator) for _ in range(steps)]


KEY_BIASES = ("k_proj.bias", "to_k.bias", "key.bias")  # their gradient is rounding noise alone


def without_noise(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: w for name, w in weights.items() if not name.endswith(KEY_BIASES)}
