"""Models from Hugging Face folders equal those of from_pretrained, without their memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GenerationConfig,
    LlamaConfig,
    T5Config,
)

from lohan.checkpoint.hf_folder import (
    build_from_config,
    build_model,
    load_config,
    persistent_buffers,
)
from lohan.checkpoint.sources import tied_names
from lohan.errors import ModelError
from tests.support import HANG_S
from tests.support.model_folders import write_random_checkpoint
from tests.support.models import FAMILY_CONFIGS, FAMILY_IDS, family_logits, save_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_same_as_from_pretrained(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    save_model(tmp_path, FAMILY_CONFIGS[family])
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model = build_model(tmp_path, dtype=dtype)
    assert type(model) is type(wanted)
    assert tied_names(model) == tied_names(wanted)
    parameters = dict(model.named_parameters())
    for name, parameter in wanted.named_parameters():
        assert parameters[name].is_meta
        assert parameters[name].dtype == parameter.dtype == dtype
        assert parameters[name].shape == parameter.shape
        assert parameters[name].requires_grad
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(wanted.named_buffers()).keys()
    for name, buffer in wanted.named_buffers():
        assert buffers[name].device.type == "cpu"
        assert buffers[name].dtype == buffer.dtype, name
        assert torch.equal(buffers[name], buffer), name
    assert model.config.use_cache is False
    assert model.config.dtype == dtype


def test_parameters_are_real_again_after_building() -> None:
    build_from_config(FAMILY_CONFIGS["llama"], dtype=torch.float32)
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_building_does_not_change_the_config() -> None:
    config = LlamaConfig(**FAMILY_CONFIGS["llama"].to_dict())
    before = config.to_dict()
    build_from_config(config, dtype=torch.bfloat16)
    assert config.to_dict() == before


def test_generation_config_comes_from_the_folder(tmp_path: Path) -> None:
    FAMILY_CONFIGS["llama"].save_pretrained(tmp_path)
    GenerationConfig(max_new_tokens=7, **FAMILY_IDS).save_pretrained(tmp_path)
    model = build_model(tmp_path, dtype=torch.float32)
    assert model.generation_config.max_new_tokens == 7
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json: .*correct or remove"):
        build_model(tmp_path, dtype=torch.float32)


def test_persistent_buffers_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    init = LlamaRMSNorm.__init__

    def with_buffer(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        self.register_buffer("scale", torch.ones(3))

    monkeypatch.setattr(LlamaRMSNorm, "__init__", with_buffer)
    model = save_model(tmp_path, FAMILY_CONFIGS["llama"])
    for i, buffer in enumerate(persistent_buffers(model).values()):
        buffer.fill_(i + 0.5)
    model.save_pretrained(tmp_path)
    built = persistent_buffers(build_model(tmp_path, dtype=torch.float32))
    assert len(built) == 5
    assert all(torch.equal(built[k], v) for k, v in persistent_buffers(model).items())


def test_errors_name_the_folder_and_the_next_move(tmp_path: Path) -> None:
    def fails(message: str, **config: object) -> None:
        if config:
            (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=rf"^{tmp_path}.*{message}.*[;,] "):
            load_config(tmp_path)

    with pytest.raises(ModelError, match=r"missing: no such folder; .*hf download"):
        load_config(tmp_path / "missing")
    fails("holds no config.json")
    fails("model_type 'no-such-type'", model_type="no-such-type")
    fails("model_type None", hidden_size=3)
    fails("quantized", model_type="llama", quantization_config={"quant_method": "hqq"})
    fails(
        "LlamaForDreaming is not a model that LoHan loads",
        model_type="llama",
        architectures=["LlamaForDreaming"],
    )
    fails("cannot use config.json", model_type="llama", hidden_size="wide")
    for wrong in ([5], "LlamaForCausalLM", {"a": 1}):
        shown = re.escape(json.dumps(wrong))
        fails(f"architectures is {shown}, not a list", model_type="llama", architectures=wrong)
    for config in (BertConfig(), T5Config()):
        config.save_pretrained(tmp_path)
        fails(rf"{config.model_type} .config.json names no architecture. is not a model")
    (tmp_path / "config.json").write_text("{,}")
    fails("config.json: not readable as JSON")
    (tmp_path / "config.json").write_text("[]")
    fails("config.json: holds list")


def test_rejects_inconsistent_sizes(tmp_path: Path) -> None:
    raw = {**FAMILY_CONFIGS["gpt2"].to_dict(), "n_head": 5}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"cannot (build the model|use config).*"):
        build_model(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt"])
def test_random_checkpoint(tmp_path: Path, family: str) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_random_checkpoint(tmp_path / name, FAMILY_CONFIGS[family], seed=seed, std=0.05)
    models = {}
    for name in "abc":
        models[name], report = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, output_loading_info=True
        )
        assert not any(report.values())
    assert torch.equal(family_logits(models["a"]), family_logits(models["b"]))
    assert not torch.equal(family_logits(models["a"]), family_logits(models["c"]))
    fresh = AutoModelForCausalLM.from_config(FAMILY_CONFIGS[family], dtype=torch.float32)
    parameters = dict(fresh.named_parameters())
    for name, parameter in models["a"].named_parameters():
        if "norm" in name or ".ln_" in name:
            assert torch.equal(parameter, parameters[name])
        elif name.endswith("bias"):
            assert not parameter.any()
        else:
            assert abs(parameter.std().item() - 0.05) < 0.01


MEMORY = """
import sys, torch
from pathlib import Path
from transformers import LlamaConfig
from lohan.checkpoint.hf_folder import export_folder
from lohan.checkpoint.hf_folder import build_from_config, build_model
from tests.support.model_folders import write_random_checkpoint
from lohan.checkpoint.sources import FolderSource, checkpoint_map, element_ranges
from lohan.checkpoint.safetensors import TensorFolder

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024

folder = Path(sys.argv[1])
sizes = dict(num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False)
build_from_config(LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, **sizes),
                  dtype=torch.float32)
base = peak()
large = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5632,
                    num_hidden_layers=8, **sizes)
model = build_from_config(large, dtype=torch.float32)
assert sum(p.numel() for p in model.parameters()) * 4 > 1.8e9
print("built", peak() - base)
small = LlamaConfig(vocab_size=32768, hidden_size=768, intermediate_size=2048,
                    num_hidden_layers=4, **sizes)
write_random_checkpoint(folder / "in", small)
print("written", peak() - base)
model = build_model(folder / "in", dtype=torch.bfloat16)
tensors = TensorFolder(folder / "in")
source = FolderSource(tensors, checkpoint_map(model, tensors).parameters)
for name, parameter in model.named_parameters():
    for start, stop in element_ranges(parameter.numel()):
        source.read_flat(name, start, stop)
print("read", peak() - base)
export_folder(folder / "out", tensors={n: tuple(p.shape) for n, p in model.named_parameters()},
              read_flat=source.read_flat, dtype=torch.bfloat16, source_folder=folder / "in")
print("exported", peak() - base)
"""


def test_memory_stays_far_below_the_model(tmp_path: Path) -> None:
    """A model of 1.9 GB is built, a checkpoint of 314 MB written, read and exported."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "in" / "model.safetensors").stat().st_size > 310e6
    grown = {line.split()[0]: int(line.split()[1]) for line in result.stdout.splitlines()}
    assert grown["built"] < 100, grown
    assert grown["exported"] < 400, grown
