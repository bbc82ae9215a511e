"""GGUF files as weights of a model folder: values are those of transformers' own loading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import lohan
from lohan.checkpoint import gguf_folder
from lohan.checkpoint.quantized import open_folder
from lohan.errors import ModelError
from tests.support.models import attached, batches, loss_of

gguf = pytest.importorskip("gguf", reason="GGUF files need the package gguf")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 90,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {"llama": LlamaConfig(**SIZES), "qwen2": Qwen2Config(**SIZES)}  # by architecture


def swapped_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of each head in the order of llama.cpp."""
    shape = heads, 2, len(rows) // heads // 2, *rows.shape[1:]
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(folder: Path, kind: str) -> Path:
    """Write a small model in one file, with several types of tensors, and its config.json."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    CONFIGS[kind].save_pretrained(folder)
    writer = gguf.GGUFWriter(folder / "model-Q4_0.gguf", kind)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(2048)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(90)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], 2)
    types = gguf.GGMLQuantizationType
    for name, tensor in model.state_dict().items():
        stem, _, ending = name.rpartition(".")
        gguf_name, values = f"{names.get_name(stem)}.{ending}", tensor.numpy()
        if kind == "llama" and (".attn_q." in gguf_name or ".attn_k." in gguf_name):
            values = swapped_pairs(values, 4 if ".attn_q." in gguf_name else 2)
        as_type = types.F32
        if values.ndim == 2:
            as_type = (
                types.Q4_0
                if "ffn" in gguf_name
                else types.Q8_0
                if "attn" in gguf_name
                else types.F16
            )
        packed = gguf.quants.quantize(np.ascontiguousarray(values), as_type)
        writer.add_tensor(gguf_name, packed, raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model-Q4_0.gguf"


@pytest.mark.parametrize("kind", CONFIGS)
def test_values_are_those_of_transformers_in_any_ranges(kind, tmp_path, monkeypatch):
    file = write_gguf(tmp_path, kind)
    load = AutoModelForCausalLM.from_pretrained
    wanted = load(tmp_path, gguf_file=file.name, dtype=torch.float32).state_dict()
    monkeypatch.setattr(gguf_folder, "_PIECE_BYTES", 300)  # a few rows
    tensors = open_folder(tmp_path)
    assert set(tensors.names()) == wanted.keys()
    for name, values in wanted.items():
        flat, count = values.reshape(-1), values.numel()
        assert torch.equal(tensors.read(name), values), name
        for start, stop in ((0, 1), (count // 3, count // 2 + 7), (count - 1, count)):
            assert torch.equal(tensors.read_flat(name, start, stop), flat[start:stop]), name


def test_model_from_gguf_trains_as_in_transformers(tmp_path):
    write_gguf(tmp_path, "llama")
    (batch,) = batches(1, batch=2, seq=8, vocab=90)
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model-Q4_0.gguf", dtype=torch.float32
    )
    model = lohan.load(tmp_path).train()
    with attached(model, tmp_path / "store"):
        loss = loss_of(model, batch)
        loss.backward()
        assert loss.item() == pytest.approx(loss_of(plain.train(), batch).item(), rel=1e-5)


def test_rejects_damaged_and_unsupported_files(tmp_path):
    file = write_gguf(tmp_path, "llama")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=rf"^{file}: .*again$"):
        tensors = open_folder(tmp_path)
        for name in tensors.names():
            tensors.read(name)
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=rf"^{file}: cannot be read as GGUF"):
        open_folder(tmp_path)
    file.write_bytes(whole.replace(b"llama", b"bloom"))
    with pytest.raises(ModelError, match="GGUF of architecture 'bloom'"):
        open_folder(tmp_path)
    file.write_bytes(whole)
    (tmp_path / "other.gguf").write_bytes(whole)
    with pytest.raises(ModelError, match="holds 2 GGUF files"):
        open_folder(tmp_path)


def test_rejects_arrays_longer_than_the_file(tmp_path):
    """A walk over them would take hours: lists in a list are empty, and cost no bytes."""
    file = write_gguf(tmp_path, "llama")
    data, name = file.read_bytes(), b"general.architecture"
    at = data.index(name) + len(name)  # type, length and "llama" follow
    listed = np.array([9, 9], "<u4").tobytes() + np.array([2**40], "<u8").tobytes()
    file.write_bytes(data[:at] + listed + bytes(64) + data[at + 17 :])
    with pytest.raises(ModelError, match=r"cannot be read as GGUF \(1,099,511,627,776 values"):
        open_folder(tmp_path)


def test_heads_that_do_not_divide_a_tensor(tmp_path):
    write_gguf(tmp_path, "llama")
    heads = {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 80}
    LlamaConfig(**{**SIZES, **heads}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"heads in config\.json do not divide"):
        open_folder(tmp_path)
