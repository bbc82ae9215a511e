"""Other programs accept an exported folder: transformers, llama.cpp's converter, vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors import safe_open

from tests.support.model_folders import CHATML_TEMPLATE, save_tokenizer
from tests.support.training_runs import train_task, write_rows

LAYERS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    torch.manual_seed(0)
    hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=264,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
            bos_token_id=259,
            eos_token_id=257,
            pad_token_id=258,
        )
    ).save_pretrained(folder / "model")
    save_tokenizer(folder / "model", template=CHATML_TEMPLATE)
    rows = [{"prompt": f"say {n}", "completion": f"it is {n}"} for n in range(4)]
    train_task(
        folder / "model", write_rows(folder / "data.jsonl", rows), folder / "run", train__steps=1
    )
    return folder / "run"


def test_chat_template_of_transformers_gives_the_tokens_of_lohan(run, lohan):
    model = hf.AutoModelForCausalLM.from_pretrained(run / "model", local_files_only=True)
    tokenizer = hf.AutoTokenizer.from_pretrained(run / "model", local_files_only=True)
    requested = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say 3"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    out = model.generate(**requested, max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(out[0, requested["input_ids"].shape[1] :], skip_special_tokens=True)
    ended = lohan(
        "generate", run, "--prompt", "say 3", "--max-new-tokens", 8, "--host", "64MiB", "--json"
    )
    assert json.loads(ended.out)[0]["text"] == text and len(text) > 2


def test_export_has_the_files_and_keys_that_servers_read(run):
    """vLLM, TGI and others go by these files and keys."""
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["dtype"] == "float32" and "quantization_config" not in config
    names = {path.name for path in (run / "model").iterdir()}
    assert {
        "model.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    } <= names


def test_every_tensor_has_a_name_in_gguf(run):
    """The table that llama.cpp's convert_hf_to_gguf.py renames by."""
    gguf = pytest.importorskip("gguf")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    with safe_open(run / "model" / "model.safetensors", "pt") as file:
        names = list(file.keys())
    actual = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    assert (
        None not in actual.values() and len(set(actual.values())) == len(actual) == 9 * LAYERS + 3
    )
