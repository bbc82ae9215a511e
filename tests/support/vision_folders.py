"""A tiny vision-language model as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as hf

from tests.support.task_runs import byte_level

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<pad>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<image>",
]
IMAGE, VIDEO, START, END, MARK = range(259, 264)
TEXT = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str) -> Any:
    inner = byte_level(SPECIAL)
    result = hf.PreTrainedTokenizerFast(
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
    hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**vision),
            text_config=hf.LlamaConfig(**TEXT),
            image_token_index=MARK,
            vision_feature_layer=-1,
        )
    ).save_pretrained(folder)
    hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessor(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
        tokenizer=tokenizer(TEMPLATE.replace("IMAGE", "<image>")),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    ).save_pretrained(folder)
