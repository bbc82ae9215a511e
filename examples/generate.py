"""Answer prompts with plain transformers, without LoHan.

    python examples/generate.py FOLDER PROMPTS.txt

FOLDER is any Hugging Face folder, such as the RUN/model that `lohan train` writes; PROMPTS.txt has
one prompt per line. Prints one JSON object per prompt: {"prompt": ..., "answer": ...}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
LONGEST_ANSWER = 56  # tokens


def answers(folder: str, prompts: list[str]) -> list[str]:
    """Return greedy answers to all prompts in one batch, with the chat template if there is one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [as_chat(tokenizer, p) for p in prompts] if tokenizer.chat_template else prompts
    batch = tokenizer(
        texts,
        return_tensors="pt",
        padding=True,
        add_special_tokens=False,
        return_token_type_ids=False,
    )
    with torch.no_grad():
        out = model.generate(
            **batch,
            max_new_tokens=LONGEST_ANSWER,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    return tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def as_chat(tokenizer, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def main() -> None:
    folder, file = sys.argv[1:]
    prompts = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    for prompt, answer in zip(prompts, answers(folder, prompts), strict=True):
        print(json.dumps({"prompt": prompt, "answer": answer}))


if __name__ == "__main__":
    main()
