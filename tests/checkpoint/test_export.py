"""An export loads with from_pretrained and gives the same logits; it is complete or absent."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lohan.checkpoint.hf_folder import export_folder, persistent_buffers
from lohan.checkpoint.replacing import MARK, write_mark
from lohan.checkpoint.sources import ModuleSource
from lohan.errors import BudgetError, ModelError, StorageIOError
from tests.support.models import FAMILY_CONFIGS, FAMILY_IDS, family_logits, save_model

Usage = namedtuple("Usage", "total used free")


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def export(model: PreTrainedModel, out: Path, **options: object) -> Path:
    settings = {
        "tensors": {name: tuple(p.shape) for name, p in model.named_parameters()},
        "read_flat": ModuleSource(model).read_flat,
        "dtype": torch.float32,
        "buffers": persistent_buffers(model),
        **options,
    }
    return export_folder(out, **settings)


def save_export(folder: Path, family: str) -> PreTrainedModel:
    """Save a model as an export does: with the mark that allows it to be overwritten."""
    model = save_model(folder, FAMILY_CONFIGS[family])
    write_mark(folder, "run")
    return model


def reload(folder: Path, **options: object) -> PreTrainedModel:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(report.values())
    return model


@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 20_000])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "opt", "gemma2", "gemma3"])
def test_same_logits_after_reload(tmp_path: Path, family: str, shard_bytes: int) -> None:
    model = save_model(tmp_path / "in", FAMILY_CONFIGS[family])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    out = export(
        model, tmp_path / "out", source_folder=tmp_path / "in", max_shard_bytes=shard_bytes
    )
    assert (out / "model.safetensors.index.json").exists() == (shard_bytes == 20_000)
    again = reload(out)
    assert torch.equal(family_logits(again), family_logits(model))
    assert again.config.use_cache is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exported_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model = save_model(tmp_path / "in", FAMILY_CONFIGS["llama"])
    export(model, tmp_path / "out", source_folder=tmp_path / "in", dtype=dtype)
    again = reload(tmp_path / "out", dtype="auto")
    assert again.dtype == dtype
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=dtype)
    assert torch.equal(family_logits(again), family_logits(wanted))
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["dtype"] == str(dtype).removeprefix("torch.")
    assert raw["architectures"] == ["LlamaForCausalLM"]


def test_everything_but_weights_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "in"
    model = save_model(source, FAMILY_CONFIGS["llama"])
    save_tokenizer(source)
    GenerationConfig(max_new_tokens=9, **FAMILY_IDS).save_pretrained(source)
    raw = json.loads((source / "config.json").read_text())
    raw["torch_dtype"] = raw.pop("dtype")
    (source / "config.json").write_text(json.dumps({**raw, "note": "é"}))
    copied = ["chat_template.jinja", "merges.txt", "tokenizer.model", "README.md"]
    for name in [*copied, "training_args.bin", ".hidden", "a.gguf", "x.safetensors.index.json"]:
        (source / name).write_text(name)
    (source / "original").mkdir()
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("t")
    out = export(model, tmp_path / "out", source_folder=source, dtype=torch.bfloat16)
    kept = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    kept |= {"tokenizer_config.json", "additional_chat_templates", MARK, *copied}
    assert {path.name for path in out.iterdir()} == kept
    assert (out / "additional_chat_templates" / "tool.jinja").read_text() == "t"
    written = json.loads((out / "config.json").read_text())
    assert written == {**raw, "note": "é", "torch_dtype": "bfloat16"}
    assert AutoTokenizer.from_pretrained(out).eos_token == "<end>"
    assert reload(out).generation_config.max_new_tokens == 9
    assert (out / "config.json").stat().st_mode & 0o777 == 0o644


def test_without_a_source_folder(tmp_path: Path) -> None:
    model = save_model(tmp_path / "in", FAMILY_CONFIGS["llama"])
    model.config.use_cache = False
    out = export(model, tmp_path / "deep" / "out", config=model.config)
    assert torch.equal(family_logits(reload(out)), family_logits(model))
    assert json.loads((out / "config.json").read_text())["use_cache"] is True
    assert model.config.use_cache is False
    plain = export(torch.nn.Linear(2, 2), tmp_path / "plain", config=object())
    assert {path.name for path in plain.iterdir()} == {MARK, "model.safetensors"}


def test_existing_target(tmp_path: Path) -> None:
    model = save_model(tmp_path / "in", FAMILY_CONFIGS["llama"])
    other = save_export(tmp_path / "out", "qwen3")
    with pytest.raises(ModelError, match=rf"{tmp_path}/out: exists and holds 4 files; .*--out"):
        export(model, tmp_path / "out", source_folder=tmp_path / "in")
    assert torch.equal(family_logits(reload(tmp_path / "out")), family_logits(other))
    export(model, tmp_path / "out", source_folder=tmp_path / "in", overwrite=True)
    assert torch.equal(family_logits(reload(tmp_path / "out")), family_logits(model))
    (tmp_path / "empty").mkdir()
    export(model, tmp_path / "empty", source_folder=tmp_path / "in")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is a file"):
        export(model, tmp_path / "file", source_folder=tmp_path / "in", overwrite=True)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").touch()
    with pytest.raises(ModelError, match="holds 1 file and no model"):
        export(model, tmp_path / "papers", source_folder=tmp_path / "in", overwrite=True)
    names = ["empty", "file", "in", "out", "papers"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_exporting_over_the_source(tmp_path: Path) -> None:
    model = save_export(tmp_path / "in", "gpt2")
    export(model, tmp_path / "in", source_folder=tmp_path / "in", overwrite=True)
    assert torch.equal(family_logits(reload(tmp_path / "in")), family_logits(model))


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), OSError(5, "I/O")])
def test_failure_leaves_nothing_behind(tmp_path: Path, error: BaseException) -> None:
    model = save_model(tmp_path / "in", FAMILY_CONFIGS["llama"])
    other = save_export(tmp_path / "old", "qwen3")
    calls = []

    def read_flat(name: str, start: int, stop: int) -> torch.Tensor:
        calls.append(name)
        if len(calls) > 5:
            raise error
        return torch.zeros(stop - start)

    for out in (tmp_path / "new" / "deep" / "out", tmp_path / "old"):
        calls.clear()
        wanted = StorageIOError if isinstance(error, OSError) else type(error)
        with pytest.raises(wanted):
            export(
                model,
                out,
                source_folder=tmp_path / "in",
                read_flat=read_flat,
                max_shard_bytes=20_000,
                overwrite=True,
            )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "old"]
    assert torch.equal(family_logits(reload(tmp_path / "old")), family_logits(other))


def test_failed_rename_brings_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "in", FAMILY_CONFIGS["llama"])
    other = save_export(tmp_path / "old", "qwen3")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".lohan-partial" in self.name:
            raise OSError(5, "Input/output error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(StorageIOError, match="Input/output error"):
        export(model, tmp_path / "old", source_folder=tmp_path / "in", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "old"]
    assert torch.equal(family_logits(reload(tmp_path / "old")), family_logits(other))


def test_disk_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path / "in", FAMILY_CONFIGS["llama"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**6, 0, 12_000))
    with pytest.raises(BudgetError, match=r"needs \d+\.\d+ KiB, 11\.72 KiB free on .*another"):
        export(model, tmp_path / "new" / "out", source_folder=tmp_path / "in")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_source_folder_gone(tmp_path: Path) -> None:
    model = save_model(tmp_path / "in", FAMILY_CONFIGS["llama"])
    with pytest.raises(ModelError, match=r"gone: the folder that the model came from"):
        export(model, tmp_path / "out", source_folder=tmp_path / "gone")
