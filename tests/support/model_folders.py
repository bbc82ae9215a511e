"""Folders with models, tokenizers and pipelines, all with random weights."""

from __future__ import annotations

import copy
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lohan.checkpoint.hf_folder import build_from_config, persistent_buffers
from lohan.checkpoint.safetensors import FileTensor, ShardedWriter
from lohan.checkpoint.sources import element_ranges
from lohan.data import IGNORE, Encoder, encode_row
from tests.support.models import FAMILY_CONFIGS, FAMILY_VOCAB, save_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# -- random weights of any size --------------------------------------------------------------------


def write_random_checkpoint(
    folder: str | os.PathLike[str],
    config: PreTrainedConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    std: float = 0.02,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a loadable folder with random weights of any size, streamed in pieces.

    Norms get the values that the model itself initialises them with, biases 0, everything else
    N(0, std). Every tensor has a seed of its own, so its values do not depend on the other
    tensors.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    model = build_from_config(config, dtype=dtype)
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.save_pretrained(path)
    owners = _owners(model)
    specs = [FileTensor(n, dtype, tuple(p.shape)) for n, p in model.named_parameters()]
    buffers = persistent_buffers(model)
    specs += [FileTensor(n, b.dtype, tuple(b.shape)) for n, b in buffers.items()]
    with ShardedWriter(path, tensors=specs, max_shard_bytes=max_shard_bytes) as writer:
        for name, parameter in model.named_parameters():
            # The CPU generator uses 32 bits of a seed.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            norm = _norm_values(model, owners[name], name.rpartition(".")[2])
            for start, stop in element_ranges(parameter.numel()):
                piece = torch.zeros(stop - start)
                if norm is not None:
                    piece = norm.reshape(-1)[start:stop]
                elif not name.endswith("bias"):
                    piece.normal_(0.0, std, generator=generator)
                writer.write(name, piece.to(dtype))
        for name, buffer in buffers.items():
            writer.write(name, buffer)


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    return {
        f"{prefix}.{name}" if prefix else name: module
        for prefix, module in model.named_modules()
        for name in module._parameters
    }


def _norm_values(model: PreTrainedModel, module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the initial values of a norm's parameter: 1, or 0 if it multiplies by 1 + w."""
    if "norm" not in type(module).__name__.lower():
        return None
    meta = module._parameters[name]
    assert meta is not None
    module._parameters[name] = nn.Parameter(torch.full(meta.shape, float(name == "weight")))
    try:
        with torch.no_grad():
            initialise: Callable[[nn.Module], None] = model._init_weights
            initialise(module)
        return module._parameters[name]
    finally:
        module._parameters[name] = meta


# -- tokenizers: one token per byte, or one per word -----------------------------------------------

WORD_TOKENS = [
    "<pad>",
    "<s>",
    "</s>",
    "<user>",
    "<bot>",
    *(f"w{i}" for i in range(FAMILY_VOCAB - 5)),
]


def write_word_model(folder: Path, kind: str, *, template: str | None = None) -> Path:
    save_model(folder, FAMILY_CONFIGS[kind])
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(WORD_TOKENS)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    result.chat_template = template
    result.save_pretrained(folder)
    return folder


def generated_in_memory(folder: Path, prompts: list[str], **how: Any) -> list[str]:
    """Plain transformers, all in memory, with the same padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.chat_template:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in prompts
        ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    torch.manual_seed(how.pop("seed", 0))
    out = model.generate(**inputs, **how)
    new = out[:, inputs["input_ids"].shape[1] :]
    return [tokenizer.decode(row, skip_special_tokens=True) for row in new]


CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOKENS = ["<|im_start|>", "<|im_end|>", "<pad>", "<s>"]


def save_tokenizer(
    folder: Path,
    *,
    template: str | None = None,
    bos: bool = False,
    merges: list[tuple[str, str]] | None = None,
) -> Path:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(a + b for a, b in merges or [])]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges or [])
    )
    level = tokenizers.pre_tokenizers.ByteLevel
    inner.pre_tokenizer = level(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(CHATML_TOKENS)
    if bos:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def byte_level_tokenizer(special: list[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer with a token for each byte, then special ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={p: i for i, p in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


@pytest.fixture(name="model_dir", scope="session")
def model_dir_fixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that saves a tokenizer with the given traits, once for each."""
    created: dict[str, Path] = {}

    def get(**traits: Any) -> Path:
        key = repr(traits)
        if key not in created:
            created[key] = save_tokenizer(tmp_path_factory.mktemp("model"), **traits)
        return created[key]

    return get


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spelled_tokens(encoder: Encoder, ids: list[int], labels: list[int]) -> tuple[str, str]:
    """Return the text of the tokens, and the same with a tilde for each token without loss."""
    decode = encoder.tokenizer("test").decode
    assert len(ids) == len(labels)
    assert all(label in (IGNORE, token) for token, label in zip(ids, labels, strict=True))
    shown = "".join(
        "~" if label == IGNORE else decode([label])
        for label in labels  # one byte or one special token each
    )
    return decode(ids), shown


def spelled_row(folder: Path, row: dict[str, Any]) -> tuple[str, str]:
    encoder = Encoder(folder)
    return spelled_tokens(encoder, *encode_row(row, encoder=encoder, place="x.jsonl, line 1"))


# -- a vision-language model -----------------------------------------------------------------------

VISION_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<pad>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<image>",
]
IMAGE_ID, VIDEO_ID, VISION_START_ID, VISION_END_ID, IMAGE_MARK_ID = range(259, 264)
VISION_TEXT_SIZES = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VISION_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vision_tokenizer(template: str) -> Any:
    inner = byte_level_tokenizer(VISION_TOKENS)
    result = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<pad>"
    )
    result.chat_template = template
    return result


def save_llava(folder: Path) -> None:
    vision = {
        "image_size": 16,
        "patch_size": 8,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
    }
    transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**vision),
            text_config=transformers.LlamaConfig(**VISION_TEXT_SIZES),
            image_token_index=IMAGE_MARK_ID,
            vision_feature_layer=-1,
        )
    ).save_pretrained(folder)
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
        tokenizer=vision_tokenizer(VISION_TEMPLATE.replace("IMAGE", "<image>")),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=VISION_TEMPLATE.replace("IMAGE", "<image>"),
    ).save_pretrained(folder)


# -- pipelines of diffusers and their data ---------------------------------------------------------

IMAGE_CLASSES = 5
TEXT_STATES, POOLED_STATES = "encoder_hidden_states", "pooled_projections"
PIPELINE_SIZES = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
JOINT_SIZES = {"joint_attention_dim": 16, "pooled_projection_dim": 12}
PIPELINE_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "dit": (
        "DiTTransformer2DModel",
        {
            **PIPELINE_SIZES,
            "in_channels": 4,
            "out_channels": 8,
            "sample_size": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": IMAGE_CLASSES,
            "dropout": 0.0,
        },
    ),
    "pixels": (
        "DiTTransformer2DModel",
        {
            **PIPELINE_SIZES,
            "in_channels": 3,
            "sample_size": 8,
            "num_embeds_ada_norm": IMAGE_CLASSES,
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **PIPELINE_SIZES,
            **JOINT_SIZES,
            "in_channels": 4,
            "out_channels": 4,
            "sample_size": 8,
            "patch_size": 2,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 8,
        },
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            **PIPELINE_SIZES,
            **JOINT_SIZES,
            "in_channels": 16,
            "num_single_layers": 2,
            "axes_dims_rope": [2, 2, 4],
            "guidance_embeds": True,
        },
    ),
}


def save_pipeline(folder: Path, kind: str, *, vae: bool = False) -> Path:
    """Save a folder with transformer and scheduler, as diffusers writes it."""
    import diffusers

    name, config = PIPELINE_CONFIGS[kind]
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**config)
    with torch.no_grad():  # gates that start as zero would hide what is behind them
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / "transformer")
    scheduler: Any = diffusers.DDIMScheduler(num_train_timesteps=50)
    if kind in ("sd3", "flux"):
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.save_pretrained(folder / "scheduler")
    if vae:
        small_autoencoder().save_pretrained(folder / "vae")
    index = {"_class_name": "Pipeline", "transformer": ["diffusers", name]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def small_autoencoder() -> nn.Module:
    from diffusers import AutoencoderKL

    torch.manual_seed(1)
    blocks = {
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
    }
    return AutoencoderKL(
        **blocks,
        block_out_channels=[8, 8],
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.5,
    )


def load_denoiser(folder: Path, kind: str) -> nn.Module:
    import diffusers

    return getattr(diffusers, PIPELINE_CONFIGS[kind][0]).from_pretrained(folder)


def save_latents(folder: Path, kind: str, count: int = 7) -> Path:
    """Save `count` latents.

    Those of DiT are in class folders. Others have their conditioning next to them, every other
    one as safetensors.
    """
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(3)
    for number in range(count):
        latent = torch.randn(4, 8, 8, generator=generator)
        if kind == "dit":
            place = folder / f"class-{number % 3}"
            place.mkdir(parents=True, exist_ok=True)
            np.save(place / f"{number}.npy", latent.numpy())
            continue
        folder.mkdir(parents=True, exist_ok=True)
        others = {
            TEXT_STATES: torch.randn(6, 16, generator=generator),
            POOLED_STATES: torch.randn(12, generator=generator),
        }
        if number % 2:
            save_file({"latents": latent, **others}, folder / f"{number}.safetensors")
            continue
        np.save(folder / f"{number}.npy", latent.numpy())
        for name, tensor in others.items():
            np.save(folder / f"{number}.{name}.npy", tensor.numpy())
    return folder
