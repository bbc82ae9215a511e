"""Train a tiny random model of every class in transformers' auto mappings and compare the results.

Sizes are set by the names that configs use for them; FAMILIES has what a family needs besides.
Three steps in memory are compared with three steps through LoHan whose blocks keep all activations,
loaded from a folder, and with three whose blocks keep nothing and run in micro-batches. Compared
are losses, weights, and Adam's first moments, which show the gradients. The first model is exported
and reloaded.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import lohan
from lohan.errors import LohanError
from tests.support.models import attached, decay_groups, first_moments, lr, master_weights

VOCAB, BATCH, SEQ, STEPS = 96, 4, 12, 3
BETAS, DECAY = (0.9, 0.95), 0.1
LIMIT = 1e-5  # of weights, as in tests.support.models; steps move them by 1e-4
NOISE = 4  # rounding may take an fp32 run so many times as far from the fp64 run as others
EPS = 1e-5  # Adam's, of the model's largest gradient: no whole step is made of rounding
ULP = 2.0**-23

# -- Configs ---------------------------------------------------------------------------------------

# By name, wherever a config has a whole number of that name.
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "emb_dim",
            "embedding_dim",
            "embedding_size",
            "word_embed_proj_dim",
            "embed_dim",
            "out_hidden_size",
            "hidden_dim",
            "lru_width",
            "backbone_hidden_size",
            "attention_hidden_size",
            "input_embedding_size",
            "output_embedding_size",
            "projection_dim",
            "text_embed_dim",
            "hidden_size_global",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "num_decoder_layers",
            "num_encoder_layers",
            "depth",
            "num_blocks",
            "num_layers_per_stack",
            "conf_num_hidden_layers",
            "num_global_layers",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "attention_heads",
            "num_encoder_attention_heads",
            "num_decoder_attention_heads",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_num_heads",
            "swa_num_attention_heads",
            "index_n_heads",
        ),
        4,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "num_query_groups", "swa_num_key_value_heads"), 2
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "d_kv",
            "dim_head",
            "d_head",
            "kv_channels",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_head_dim",
            "attention_head_size",
            "swa_head_dim",
            "v_head_dim",
            "qk_nope_head_dim",
            "attention_head_dim",
            "index_head_dim",
            "global_head_dim",
        ),
        8,
    ),
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "rotary_dim": 4,
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "d_ff",
            "dim_ff",
            "dff",
            "d_inner",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "ffn_hidden_size",
            "feed_forward_size",
            "mlp_dim",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "shared_intermediate_size",
        ),
        48,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
            "router_hidden_size",
        ),
        24,
    ),
    **dict.fromkeys(
        (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "moe_num_experts",
        ),
        4,
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2
    ),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), 1),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "context_length",
            "max_source_positions",
            "max_target_positions",
            "model_max_length",
        ),
        64,
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "adapter_rank"), 16),
    **dict.fromkeys(("laurel_rank", "hc_lowrank", "gated_norm_rank"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "ple_embed_dim"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "prompt_length": 4,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_expand": 2}
BOTH = {"layer_types": ["linear_attention", "full_attention"]}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
MROPE = {
    "rope_parameters": {  # positions of time, height and width
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 1.0,
    }
}
STAGES = {"image_size": 64, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"image_token_index": 3, "num_query_tokens": 4},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [1, 1, 2]},
        "moe_intermediate_size": [24, 24],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "florence_vision": {
        "depths": [1, 1],
        "embed_dim": [16, 32],
        "num_heads": [2, 2],
        "num_groups": [2, 2],
        "patch_size": [4, 2],
        "patch_stride": [4, 2],
        "patch_padding": [0, 0],
        "patch_prenorm": [False, True],
        "window_size": 2,
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "janus_vqgan": {
        "num_embeddings": 16,
        "latent_channels": 32,
        "base_channels": 32,
        "num_res_blocks": 1,
        "channel_multiplier": [1, 1],
        "image_token_embed_dim": 32,
    },
    "vision-encoder-decoder": {"pad_token_id": 0},
    "voxtral": {"audio_token_id": 7},
    "voxtral_encoder": {"intermediate_size": 128},
    "instructblip": {"image_token_index": 3, "num_query_tokens": 4},
    "llama4_vision_model": {
        "intermediate_size": 128,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
    },
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6, "input_size": 16},
    "lilt": {"hidden_size": 48},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "kimi_k25": {"projection_hidden_size": 32},
    "mllama_vision_model": {
        "intermediate_layers_indices": [0, 1],
        "num_global_layers": 1,
        "vision_output_dim": 96,
    },
    "qwen2_5_omni_thinker": {"vision_start_token_id": 5},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 5},
    "t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    **dict.fromkeys(
        (
            "glm4v_moe_text",
            "glm4v_text",
            "glm_ocr_text",
            "paddleocr_vl_text",
            "qwen2_5_omni_text",
            "qwen2_5_vl_text",
            "qwen2_vl_text",
        ),
        MROPE,
    ),
    "hunyuan_vl_text": {"head_dim": 8},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_hash_byte_group_size": [3, 4],
        "patch_in_forward": False,
    },
    "convnext": STAGES,
    "convnextv2": STAGES,
    "cohere_compass_text": {
        "layer_types": ["full_attention", "full_attention"],
        "rope_parameters": {"full_attention": ROPE["rope_parameters"]},
    },
    "dbrx": {**ROPE, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "donut-swin": SWIN,
    "swin": SWIN,
    "swinv2": SWIN,
    "esm": {"vocab_size": VOCAB, "mask_token_id": 3, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": 4},
    "hgnet_v2": {"stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [1, 1, 1, 1]},
    "hiera": {
        "image_size": [32, 32],
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "masked_unit_size": [4, 4],
        "num_query_pool": 1,
    },
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 32},
    "mobilevit": {"image_size": 64},
    "mobilevitv2": {"image_size": 128},
    "levit": {"image_size": 64},
    "pvt": {**STAGES, "num_attention_heads": [1, 1, 2, 2]},
    "pvt_v2": {**STAGES, "num_attention_heads": [1, 1, 2, 2]},
    "regnet": {**STAGES, "embedding_size": 8, "groups_width": 8},
    "resnet": {**STAGES, "embedding_size": 8},
    "segformer": {**STAGES, "num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},
    "falcon_mamba": {"intermediate_size": 64},
    "gemma3n_text": {
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "head_dim": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**MAMBA2, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 4},
    "longformer": {"attention_window": [4, 4], "sep_token_id": 3},
    "mamba": {"intermediate_size": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
    },
    "olmo_hybrid": BOTH,
    "qwen3_5_moe_text": BOTH,
    "qwen3_5_text": BOTH,
    "qwen3_next": BOTH,
    "qwen4_exp_text": BOTH,
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 4,
        "is_decoder": True,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_hidden_layers": 4,
        "mamba_dt_rank": 4,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "n_mamba_heads": 2,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_hidden_layers": 4,
        "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": 8,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "use_mem_eff_path": False,
    },
    "zaya": {"num_experts_per_tok": 1},
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
MARKS = {  # tokens that stand for something else; what is not named here is 8
    **dict.fromkeys(("image_token_id", "image_token_index"), 3),
    **dict.fromkeys(("video_token_id", "video_token_index"), 4),
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
    **dict.fromkeys(("audio_token_id", "audio_token_index"), 7),
}
FIRST_TEXT = 10


def small(config: PreTrainedConfig, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments of a small config of the same class."""
    created: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            created[name] = small(value, FAMILIES.get(value.model_type))
            if value.model_type:
                created[name]["model_type"] = value.model_type
        elif isinstance(value, bool) or name.startswith("_"):
            continue
        elif isinstance(value, int) and name in SIZES:
            created[name] = SIZES[name]
        elif isinstance(value, float) and any(word in name for word in ("drop", "jitter", "pdrop")):
            created[name] = 0.0
        elif isinstance(value, int) and name.endswith(("token_id", "token_index")):
            created[name] = IDS.get(name, MARKS.get(name, 8))
        elif name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            created[name] = {**value, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
        elif name == "deepstack_visual_indexes":
            created[name] = [0]
    if "qk_rope_head_dim" in created:
        created.pop("head_dim", None)
        created["num_key_value_heads"] = created["num_attention_heads"]
    for name in IDS:
        if hasattr(config, name):
            created[name] = IDS[name]
    return merged(created, given or {})


def merged(config_fields: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        if isinstance(value, Mapping) and isinstance(config_fields.get(name), dict):
            config_fields[name] = merged(config_fields[name], value)
        elif value is DROP:
            config_fields.pop(name, None)
        else:
            config_fields[name] = value
    return config_fields


DROP = object()  # the class's own value


def tiny_config(model_type: str) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[model_type]
    given = FAMILIES.get(model_type, {})
    try:
        first = kind()
    except Exception:
        return kind(**given)
    return kind(**small(first, given))


# -- Models and their data -------------------------------------------------------------------------

MAPPINGS = {
    "causal": "CAUSAL_LM",
    "text to text": "SEQ_TO_SEQ_CAUSAL_LM",
    "masked": "MASKED_LM",
    "sequence": "SEQUENCE_CLASSIFICATION",
    "token": "TOKEN_CLASSIFICATION",
    "question": "QUESTION_ANSWERING",
    "image": "IMAGE_CLASSIFICATION",
    "image-text": "IMAGE_TEXT_TO_TEXT",
}


def classes(kind: str) -> dict[str, str]:
    """Class by model type, each class once."""
    names = getattr(modeling_auto, f"MODEL_FOR_{MAPPINGS[kind]}_MAPPING_NAMES")
    types: dict[str, list[str]] = {}
    for model_type, name in names.items():
        types.setdefault(name if isinstance(name, str) else name[0], []).append(model_type)
    return {max(reversed(of), key=partial(_alike, name)): name for name, of in types.items()}


def _alike(name: str, model_type: str) -> int:
    """Of several types, the one that a class is for has most of its name."""
    pairs = zip(name, CONFIG_MAPPING_NAMES.get(model_type, ""), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def build(kind: str, model_type: str) -> nn.Module:
    cls = getattr(transformers, classes(kind)[model_type])
    config = tiny_config(model_type)
    wanted = cls.config_class
    if not isinstance(config, wanted):
        parts = [value for value in vars(config).values() if isinstance(value, wanted)]
        config = parts[0] if parts else config.get_text_config()
    config.use_cache = False
    two = kind == "text to text" or getattr(config, "is_encoder_decoder", False)
    if two and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = IDS["decoder_start_token_id"]
    if kind == "token":
        config.classifier_dropout = 0.0  # 0.1 of its own in some
    if kind in ("causal", "masked") and hasattr(config, "is_decoder"):
        config.is_decoder = kind == "causal"
    torch.manual_seed(0)
    model = cls(config).float().train()
    with torch.no_grad():  # what starts as zero would hide what is behind it
        left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()  # computed positions
        for name, parameter in model.named_parameters():
            if not any(re.search(pattern, name) for pattern in left_out):
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def batches_for(kind: str, model: nn.Module, steps: int = STEPS) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(5)
    return [batch_for(kind, model, g) for _ in range(steps)]


def batch_for(kind: str, model: nn.Module, g: torch.Generator) -> dict[str, Any]:
    takes = inspect.signature(model.forward).parameters
    if kind == "image":
        size = getattr(model.config, "image_size", None)
        size = size if isinstance(size, int) else size[0] if size else 64
        pixels = torch.randn(BATCH, 3, size, size, generator=g)
        return {"pixel_values": pixels, "labels": torch.randint(0, 2, (BATCH,), generator=g)}
    ids = torch.randint(FIRST_TEXT, VOCAB, (BATCH, SEQ), generator=g)
    batch: dict[str, Any] = {}
    if kind == "image-text" or "input_features" in takes:
        batch, tokens = (images_for if kind == "image-text" else sounds_for)(model, g)
        ids = torch.cat([ids[:, :2], tokens, ids[:, 2:]], 1)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    if "input_ids" in takes:
        batch["input_ids"] = ids
    if "attention_mask" in takes:
        batch["attention_mask"] = mask
    for name in ("mm_token_type_ids", "token_type_ids"):
        if kind == "image-text" and name in takes:
            batch[name] = (ids == MARKS["image_token_id"]).long()
    if kind == "sequence":
        ids[0, -1], ids[1, 8], ids[2:, -1] = (IDS["eos_token_id"],) * 3  # where some models look
        batch["labels"] = torch.randint(0, 2, (BATCH,), generator=g)
    elif kind == "token":
        batch["labels"] = torch.randint(0, 2, (BATCH, SEQ), generator=g)
    elif kind == "question":
        batch["start_positions"] = torch.randint(0, SEQ, (BATCH,), generator=g)
        batch["end_positions"] = torch.randint(0, SEQ, (BATCH,), generator=g)
    elif getattr(model.config, "is_encoder_decoder", False):
        batch["labels"] = torch.randint(FIRST_TEXT, VOCAB, (BATCH, 6), generator=g)
    else:
        labels = ids.masked_fill((mask == 0) | (ids < FIRST_TEXT), -100)
        labels[:, :2] = -100
        batch["labels"] = labels
    return batch


def sounds_for(model: nn.Module, g: torch.Generator) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a spectrogram for each row, and the tokens that stand for it."""
    takes = inspect.signature(model.forward).parameters
    audio = getattr(model.config, "audio_config", None)
    if audio is None or not hasattr(audio, "max_source_positions"):
        return {}, torch.empty((BATCH, 0), dtype=torch.long)
    length = 2 * audio.max_source_positions  # before its convolutions
    batch = {"input_features": torch.randn(BATCH, audio.num_mel_bins, length, generator=g)}
    for name in ("feature_attention_mask", "input_features_mask"):
        if name in takes:
            batch[name] = torch.ones(BATCH, length, dtype=torch.long)
    mark = first_of(model.config, "audio_token_id", "audio_token_index", default=7)
    count = tokens_for(model, batch, "get_audio_features") or 1  # one that the model makes more of
    return batch, torch.full((BATCH, count), mark)


def images_for(model: nn.Module, g: torch.Generator) -> tuple[dict[str, Any], torch.Tensor]:
    """Return an image for each row, as the processor of the model would, and its tokens.

    There are as many tokens as the model has image features.
    """
    takes = inspect.signature(model.forward).parameters
    vision = vision_config(model.config)
    if vision is None:
        return {}, torch.empty((BATCH, 0), dtype=torch.long)
    side = first_of(vision, "image_size", default=16)
    patch = first_of(vision, "patch_size", default=4)
    channels = first_of(vision, "in_channels", "in_chans", "num_channels", default=3)
    frames = first_of(vision, "temporal_patch_size", default=1)
    batch: dict[str, Any] = {}
    if "image_grid_thw" in takes:
        batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * BATCH)
        shape = (BATCH * 16, channels * frames * patch * patch)
        if model.config.model_type in ("kimi_k25", "paddleocr_vl"):
            shape = (BATCH * 16, channels, patch, patch)
        if "image_merge_sizes" in takes:
            batch["image_merge_sizes"] = torch.full((BATCH,), 2)
    elif "spatial_shapes" in takes:
        batch["spatial_shapes"] = torch.tensor([[4, 4]] * BATCH)
        batch["pixel_attention_mask"] = torch.ones(BATCH, 16, dtype=torch.long)
        shape = (BATCH, 16, channels * patch * patch)
    elif "aspect_ratio_ids" in takes:  # tiles, and which of them each token sees
        tiles = first_of(vision, "max_num_tiles", default=1)
        batch["aspect_ratio_ids"] = torch.ones(BATCH, 1, dtype=torch.long)
        batch["aspect_ratio_mask"] = torch.tensor([[[1] + [0] * (tiles - 1)]] * BATCH)
        batch["cross_attention_mask"] = batch["aspect_ratio_mask"][:, None].repeat(1, SEQ, 1, 1)
        shape = (BATCH, 1, tiles, channels, side, side)
    elif "image_attention_mask" in takes:
        batch["image_attention_mask"] = torch.ones(BATCH, SEQ, 1, dtype=torch.long)
        shape = (BATCH, 1, channels, side, side)
    elif "pixel_attention_mask" in takes:
        shape = (BATCH, 1, channels, side, side)
    elif hasattr(model.config, "image_grid_pinpoints"):  # the whole, and one tile
        model.config.image_grid_pinpoints = [[side, side]]
        batch["image_sizes"] = torch.tensor([[side, side]] * BATCH)
        shape = (BATCH, 2, channels, side, side)
    else:
        shape = (BATCH, channels, side, side)
        if vision.model_type == "pixtral":
            batch["image_sizes"] = torch.tensor([[side, side]] * BATCH)
    if "qformer_input_ids" in takes:
        batch["qformer_input_ids"] = torch.randint(FIRST_TEXT, VOCAB, (BATCH, 4), generator=g)
    name = "pixel_values_images" if "pixel_values_images" in takes else "pixel_values"
    batch[name] = torch.randn(shape, generator=g)
    count = tokens_for(model, batch, "get_image_features")
    return batch, torch.full((BATCH, count), MARKS["image_token_id"])


def tokens_for(model: nn.Module, given: dict[str, Any], method: str) -> int:
    """Return the number of features that a method of the model computes for one row.

    The result is 0 if images enter the text in another way than by tokens.
    """
    parts = (p for p in ("model.encoder", "model", "") if hasattr(_part(model, p), method))
    part = next(parts, None)
    if part is None:
        return 0
    ask = getattr(_part(model, part), method)
    parameters = inspect.signature(ask).parameters
    with torch.no_grad():
        actual = ask(**{name: value for name, value in given.items() if name in parameters})
    for name in ("pooler_output", "last_hidden_state"):
        actual = actual if getattr(actual, name, None) is None else getattr(actual, name)
    parts = [actual] if isinstance(actual, torch.Tensor) else list(actual)
    return sum(part.numel() // part.shape[-1] for part in parts) // BATCH


def _part(model: nn.Module, name: str) -> nn.Module | None:
    with suppress(AttributeError):
        return model.get_submodule(name)
    return None


def vision_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    encoder = getattr(config, "encoder", None)
    for holder in (config, encoder):
        if getattr(holder, "vision_config", None) is not None:
            return holder.vision_config
    return encoder if hasattr(encoder, "image_size") else None


def first_of(config: PreTrainedConfig, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int):
            return value
    return default


# -- One row ---------------------------------------------------------------------------------------


@dataclass
class Row:
    kind: str
    model_type: str
    name: str
    status: str  # exact, nothing kept, refused, wrong, error, not in memory, not built
    reason: str = ""
    kept: int = 0  # classes of activations
    idle: str = ""  # lists of blocks that its batches do not reach: of what takes images, say
    gradients: bool = False  # were compared too, not losses and weights alone


Weights = dict[str, torch.Tensor]


@dataclass
class Run:
    losses: list[float]
    weights: Weights
    moments: Weights  # a mean of the gradients, in which the last weighs most


def row_of(kind: str, model_type: str, place: Path) -> Row:
    """Build, train and compare one class."""
    row = Row(kind, model_type, classes(kind)[model_type], "not built")
    try:
        model = build(kind, model_type)
    except Exception as error:
        row.reason = first_line(error)
        return row
    count = sum(p.numel() for p in model.parameters())
    if count > 40_000_000:
        row.reason = f"{count} parameters"
        return row
    row.status = "not in memory"
    try:
        data = batches_for(kind, model)
        reached = modules_called(model, data[0])
        compare = Compare(model, data)
        if not all(map(math.isfinite, compare.plain.losses)):
            raise RuntimeError(f"losses {compare.plain.losses}")
    except Exception as error:
        row.reason = first_line(error)
        return row
    row.status = "error"
    optimizer = lohan.AdamW(lr=lr, betas=BETAS, weight_decay=DECAY, eps=compare.eps)
    try:
        kept = trained_from_folder(model, data, place, row, reached, optimizer=optimizer)
        if problem := compare.problem("kept", kept):
            row.status, row.reason = "wrong", problem
            return row
        recomputed = trained_in_micro_batches(model, data, place, optimizer=optimizer)
        if problem := compare.problem("recomputed", recomputed):
            row.status, row.reason = "wrong", problem
            return row
    except LohanError as error:
        row.status, row.reason = "refused", str(error)
        return row
    row.status = "exact" if row.kept else "nothing kept"
    row.gradients = True
    return row


def trained_from_folder(
    model: nn.Module,
    data: list[dict[str, Any]],
    place: Path,
    row: Row,
    reached: set[str],
    **options: Any,
) -> Run:
    """Train from a folder, keeping all activations; export and reload by the class itself."""
    folder, out = place / "folder", place / "out"
    model.save_pretrained(folder)
    loaded = lohan.load(folder)
    if type(loaded) is not type(model):
        raise LohanError(f"the folder is loaded as {type(loaded).__name__}")
    loaded.train()
    options |= {"batch": data[0], "activations": "all"}
    with attached(loaded, place / "kept", **options) as session:
        losses = losses_of(loaded, data)
        row.kept = len(session.plan.kept)
        row.idle = idle_lists(session, reached)
        if session.step != len(data):
            raise RuntimeError(f"{session.step} steps were taken of {len(data)}")
        run = Run(losses, master_weights(session), first_moments(session))
        session.export(out)
    again = type(model).from_pretrained(out, dtype=torch.float32)
    named = dict(again.named_parameters())
    for name, value in run.weights.items():
        if name not in named:
            raise RuntimeError(f"{name} is not in the reloaded export")
        if not torch.equal(named[name], value) and not _changed_by_loading(
            model, run.weights, name
        ):
            raise RuntimeError(f"{name} differs after export and reload")
    return run


def modules_called(model: nn.Module, batch: dict[str, Any]) -> set[str]:
    """Names of the modules that a forward calls."""
    called: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
        for name, module in model.named_modules()
    ]
    with torch.no_grad():
        copy.deepcopy(model)(**batch)
    for hook in hooks:
        hook.remove()
    return called


def idle_lists(session: lohan.Session, reached: set[str]) -> str:
    """Return the lists of blocks of which none was called."""
    lists: dict[str, bool] = {}
    for site in session.executor.blocks.sites:
        name, _, number = site.name.rpartition(".")
        if number.isdecimal():
            lists[name] = lists.get(name, False) or site.name in reached
    return ", ".join(name for name, called in lists.items() if not called)


def _changed_by_loading(model: nn.Module, weights: Weights, name: str) -> bool:
    """Whether transformers itself does not get back what it has saved."""
    model = copy.deepcopy(model)
    model.load_state_dict(weights, strict=False)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder, dtype=torch.float32)
    return not torch.equal(again.get_parameter(name), weights[name])


def trained_in_micro_batches(
    model: nn.Module, data: list[dict[str, Any]], place: Path, **options: Any
) -> Run:
    """From memory, with nothing kept."""
    model = copy.deepcopy(model)
    options |= {"batch": data[0], "activations": "recompute", "micro_batch": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # blocks that mix samples
        with attached(model, place / "again", **options) as session:
            losses = losses_of(model, data)
            if session.step != len(data):
                raise RuntimeError(f"{session.step} steps were taken of {len(data)}")
            return Run(losses, master_weights(session), first_moments(session))


def losses_of(model: nn.Module, data: list[dict[str, Any]]) -> list[float]:
    losses = []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
    return losses


class Compare:
    """Compares a run with the same run in memory.

    Where two fp32 runs differ, a run in fp64 distinguishes rounding from errors, together with
    the effect of rounding on fp32 runs whose weights were moved by an ulp.
    """

    FEW, MANY = 3, 16  # such runs, at first and before a gradient is called wrong

    def __init__(self, model: nn.Module, data: list[dict[str, Any]]) -> None:
        self.model, self.data = model, data
        self.eps = EPS * largest_gradient(model, data[0])
        self.plain = in_memory(copy.deepcopy(model), data, self.eps)
        self._far: list[dict[str, float]] = []  # of each run's moments from those in fp64

    def problem(self, what: str, run: Run) -> str:
        """Empty if it is the run in memory."""
        plain = self.plain
        for step, (one, other) in enumerate(zip(run.losses, plain.losses, strict=True)):
            if abs(one - other) > 1e-5 * abs(other) and not self._loss_noise(step, one, other):
                return f"{what}: the loss of step {step + 1} is {one}, in memory {other}"
        if run.weights.keys() != plain.weights.keys():
            return f"{what}: parameters {sorted(run.weights.keys() ^ plain.weights.keys())[:4]}"
        for name, value in run.weights.items():
            away = distance(value, plain.weights[name])
            if not away < LIMIT and not self._weight_noise(name, value):
                return f"{what}: {name} is {away:.1e} from the run in memory"
        for name, value in run.moments.items():
            near = ULP * float(plain.moments[name].abs().amax()) if value.numel() else 0.0
            if not distance(value, plain.moments[name]) <= near and (
                reason := self._wrong_gradient(name, value)
            ):
                return f"{what}: the gradient of {name} is {reason}"
        return ""

    def _wrong_gradient(self, name: str, value: torch.Tensor) -> str:
        rounding = distance(value, self.wide.moments[name])
        for runs in (self.FEW, self.MANY):
            noise = self._noise(name, runs)
            if rounding <= NOISE * noise:
                return ""
        largest = float(self.plain.moments[name].abs().max())
        return f"{rounding:.1e} from fp64, rounding {noise:.1e}, its largest {largest:.1e}"

    def _noise(self, name: str, runs: int) -> float:
        """How far from fp64 a tensor of moments is in the worst of some fp32 runs."""
        wide = self.wide.moments
        while len(self._far) <= runs:
            run = self.plain
            if self._far:
                run = in_memory(moved_by_an_ulp(self.model, len(self._far)), self.data, self.eps)
            self._far.append({key: distance(wide[key], run.moments[key]) for key in wide})
        rounded = ULP / 2 * float(wide[name].abs().max())
        return max(rounded, *(far[name] for far in self._far))

    def _weight_noise(self, name: str, value: torch.Tensor) -> bool:
        true = self.wide.weights[name]
        expected = distance(self.plain.weights[name], true)
        return distance(value, true) <= max(LIMIT, NOISE * expected)

    def _loss_noise(self, step: int, one: float, other: float) -> bool:
        true = self.wide.losses[step]
        return abs(one - true) <= NOISE * abs(other - true)

    @cached_property
    def wide(self) -> Run:
        """In fp64, where the model can."""
        model = copy.deepcopy(self.model).double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the grouped product has no fp64
        torch.set_default_dtype(torch.float64)
        data = [
            {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
            for batch in self.data
        ]
        try:
            run = in_memory(model, data, self.eps)
        except RuntimeError:  # casts to fp32 inside
            return self.plain
        finally:
            torch.set_default_dtype(torch.float32)
        finite = all(torch.isfinite(value).all() for value in run.moments.values())
        return run if finite else self.plain


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def moved_by_an_ulp(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy whose weights are changed by at most an ulp."""
    model, g = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1 + ULP * torch.randint(-1, 2, value.shape, generator=g))
    return model


def largest_gradient(model: nn.Module, batch: dict[str, Any]) -> float:
    model = copy.deepcopy(model)
    model(**batch).loss.backward()
    actual = [p.grad.abs().max() for p in model.parameters() if p.grad is not None and p.numel()]
    return float(torch.stack(actual).max())


def in_memory(model: nn.Module, data: list[dict[str, Any]], eps: float) -> Run:
    """Trains this model with torch's AdamW."""
    optimizer = torch.optim.AdamW(decay_groups(model, DECAY), lr=1.0, betas=BETAS, eps=eps)
    losses = []
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.step()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    moments = {
        name: optimizer.state[p]["exp_avg"] if p in optimizer.state else torch.zeros_like(p)
        for name, p in model.named_parameters()
    }
    return Run(losses, weights, moments)


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:200]}"
