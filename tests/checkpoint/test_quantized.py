"""Quantized checkpoints have the values of transformers' dequantisation.

Training and export match those of the dequantised folder.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GptOssConfig,
    MixtralConfig,
    Mxfp4Config,
    PreTrainedModel,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import lohan
from lohan.checkpoint import quantized, safetensors
from lohan.checkpoint.hf_folder import build_model, load_config
from lohan.checkpoint.quantized import open_folder
from lohan.checkpoint.sources import FolderSource, checkpoint_map
from lohan.errors import ModelError
from tests.support.models import (
    FAMILY_CONFIGS,
    FAMILY_VOCAB,
    GROUPED_SIZES,
    assert_same,
    attached,
    batches,
    loss_of,
    master_weights,
    save_model,
)

BLOCK = (16, 8)
GPT_OSS = GptOssConfig(
    **GROUPED_SIZES, num_local_experts=3, num_experts_per_tok=2, sliding_window=16
)
GPT_OSS.intermediate_size = 64
GPT_OSS.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
FORMATS = {
    "fp8": FAMILY_CONFIGS["llama"],
    "fp8 experts": MixtralConfig(**GROUPED_SIZES, num_local_experts=3, num_experts_per_tok=2),
    "mxfp4": GPT_OSS,
}


def fp8(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise as in DeepSeek-V3: the largest value of a block becomes the largest of float8."""
    rows, columns = weight.shape
    grid = [math.ceil(size / step) for size, step in zip(weight.shape, block, strict=True)]
    scales = torch.empty(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = part.abs().max() / 448
    return (weight / spread(scales, block, rows, columns)).to(torch.float8_e4m3fn), scales


def spread(scales: torch.Tensor, block: tuple[int, int], rows: int, columns: int) -> torch.Tensor:
    """Return a scale for each element, as weight_block_size is documented."""
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[:rows, :columns]


def quantize(folder: Path, method: str) -> None:
    """Quantize the weights of a folder's layers, in place."""
    held = load_file(folder / "model.safetensors")
    for name, weight in list(held.items()):
        if method == "fp8" and ".layers." in name and weight.dim() == 2 and "gate.w" not in name:
            held[name], held[f"{name}_scale_inv"] = fp8(weight)
        elif method == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = held.pop(name).shape
            shape = (experts, rows, columns // 32)
            held[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            held[f"{name}_scales"] = torch.randint(116, 124, shape, dtype=torch.uint8)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"fp8": {"weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}}
    set_config(folder, quantization_config={"quant_method": method, **settings.get(method, {})})


def set_config(folder: Path, **values: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **values}))


@pytest.fixture(params=FORMATS)
def folder(request, tmp_path) -> Path:
    torch.manual_seed(3)
    save_model(tmp_path / "quantized", FORMATS[request.param])
    quantize(tmp_path / "quantized", request.param.split()[0])
    return tmp_path / "quantized"


def by_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    method = load_raw(folder)["quantization_config"]["quant_method"]
    how = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}[method](dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=how)


def load_raw(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_values_are_those_of_transformers_in_any_ranges(folder):
    tensors = open_folder(folder)
    actual = checkpoint_map(build_model(folder, dtype=torch.float32), tensors)
    assert actual.ignored == ()
    source = FolderSource(tensors, actual.parameters)
    for dtype in (torch.float32, torch.bfloat16):
        for name, parameter in by_transformers(folder, dtype).named_parameters():
            flat, step = parameter.detach().reshape(-1), 1009  # a prime: pieces end inside of rows
            for start in range(0, len(flat), step):
                stop = min(start + step, len(flat))
                part = source.read_flat(name, start, stop)
                assert torch.equal(part.to(flat.dtype), flat[start:stop]), name


def test_training_and_export_are_those_of_the_dequantised_folder(folder, tmp_path):
    plain = build_plain(folder)
    plain.save_pretrained(tmp_path / "plain")
    runs = []
    for place in (folder, tmp_path / "plain"):
        net = lohan.load(place).train()
        with attached(net, tmp_path / f"store of {place.name}") as session:
            losses = []
            for batch in batches(2, batch=2, seq=6, vocab=FAMILY_VOCAB):
                loss = loss_of(net, batch)
                loss.backward()
                losses.append(loss.item())
            runs.append((losses, master_weights(session)))
            session.export(tmp_path / f"tuned {place.name}", dtype="bf16")
    (losses, weights), (expected_losses, expected) = runs
    assert losses == expected_losses
    assert_same(weights, expected)
    tuned, other = tmp_path / "tuned quantized", tmp_path / "tuned plain"
    assert "quantization_config" not in load_raw(tuned)
    assert load_raw(tuned)["dtype"] == "bfloat16"
    assert_same(load_file(tuned / "model.safetensors"), load_file(other / "model.safetensors"))


def build_plain(folder: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(by_transformers(folder).state_dict())
    return plain


def one_weight(
    folder: Path, weight: torch.Tensor, scales: torch.Tensor, block: list[int] | None
) -> Path:
    save_file({"w": weight, "w_scale_inv": scales}, folder / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": block}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return folder


def test_blocks_at_the_ends_of_a_matrix_may_be_smaller(tmp_path):
    weight, block = torch.randn(72, 50), (32, 16)
    packed, scales = fp8(weight, block)
    tensors = open_folder(one_weight(tmp_path, packed, scales, list(block)))
    assert tensors.names() == ["w"]
    assert torch.equal(tensors.read("w"), packed.float() * spread(scales, block, 72, 50))


@pytest.mark.parametrize("kind", ["one scale", "a scale for each expert", "exponents", "e8m0"])
def test_scales_of_other_shapes_and_dtypes(kind, tmp_path):
    packed = torch.randn(3, 8, 6).to(torch.float8_e4m3fn)
    block: list[int] | None = None
    if kind == "one scale":
        packed, scales = packed[0].clone(), torch.tensor(0.37)
        wide = scales
    elif kind == "a scale for each expert":
        scales = torch.rand(3, 1, 1)
        wide = scales
    else:
        block, powers = [4, 3], torch.randint(120, 130, (3, 2, 2), dtype=torch.uint8)
        scales = powers if kind == "exponents" else powers.view(torch.float8_e8m0fnu)
        exact = (powers.float() - 127).exp2()
        wide = exact.repeat_interleave(4, 1).repeat_interleave(3, 2)
    tensors = open_folder(one_weight(tmp_path, packed, scales, block))
    expected = (packed.float() * wide).reshape(-1)
    assert torch.equal(tensors.read_flat("w", 0, packed.numel()), expected)
    assert torch.equal(tensors.read_flat("w", 13, 41), expected[13:41])


def test_mxfp4_decodes_every_byte_as_transformers(tmp_path):
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 4, 2, 16)
    scales = torch.tensor([0, 1, 100, 126, 127, 128, 200, 253] * 2, dtype=torch.uint8).view(2, 4, 2)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    tensors = open_folder(tmp_path)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert tensors.shape("w") == (2, 64, 4)
    assert torch.equal(tensors.read("w"), expected)
    assert torch.equal(tensors.read_flat("w", 250, 263), expected.reshape(-1)[250:263])


NF4 = [
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.09105003,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
]


def bitsandbytes_4bit(
    name: str, shape: tuple[int, int], nested: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a weight as bitsandbytes saves it, and its values by the documented formula.

    A value is the table entry times the scale of its 64 elements, rounded to the original
    dtype.
    """
    numel = math.prod(shape)
    places = torch.randint(0, 16, (numel + numel % 2,))
    scales = torch.rand(math.ceil(numel / 64))
    settings: dict[str, object] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"}
    held = {name: (places[0::2] * 16 + places[1::2]).to(torch.uint8)[:, None]}
    held[f"{name}.absmax"] = scales
    if nested:
        bytes_, table = torch.randint(0, 256, scales.shape), torch.linspace(-1, 1, 256)
        outer = torch.rand(math.ceil(len(scales) / 4))
        settings |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 1.25}
        scales = table[bytes_] * outer.repeat_interleave(4)[: len(scales)] + 1.25
        held[f"{name}.absmax"] = bytes_.to(torch.uint8)
        held |= {f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": table}
    state = json.dumps({**settings, "shape": list(shape)}).encode()
    held[f"{name}.quant_map"] = torch.tensor(NF4)
    held[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
    values = torch.tensor(NF4)[places[:numel]] * scales.repeat_interleave(64)[:numel]
    return held, values.bfloat16().float().view(shape)


def bitsandbytes_folder(folder: Path, bits: str) -> dict[str, torch.Tensor]:
    """Write a model whose layers are quantized, and return its values."""
    model = save_model(folder, FAMILY_CONFIGS["llama"])
    held = load_file(folder / "model.safetensors")
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, weight in list(held.items()):
        if ".layers." not in name or weight.dim() != 2:
            continue
        if bits == "8":
            largest = weight.abs().amax(1)
            held[name] = (weight / largest[:, None] * 127).round().to(torch.int8)
            stem = name.removesuffix(".weight")
            held |= {f"{stem}.SCB": largest, f"{stem}.weight_format": torch.zeros(1).byte()}
            values[name] = held[name].float() * largest[:, None] * 7.874015748031496e-3
        else:
            result, values[name] = bitsandbytes_4bit(name, tuple(weight.shape), bits == "4 nested")
            held |= result
    save_file(held, folder / "model.safetensors")
    set_config(folder, quantization_config={"quant_method": "bitsandbytes"})
    return values


def check_values(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Check that a folder that is read range by range has these values."""
    tensors = open_folder(folder)
    actual = checkpoint_map(lohan.load(folder), tensors)
    assert actual.ignored == ()
    source = FolderSource(tensors, actual.parameters)
    for name, values in expected.items():
        flat = values.reshape(-1)
        for start in range(0, len(flat), 1009):
            stop = min(start + 1009, len(flat))
            assert torch.equal(source.read_flat(name, start, stop), flat[start:stop]), name


@pytest.mark.parametrize("bits", ["8", "4", "4 nested"])
def test_bitsandbytes_weights_match_formula(bits, tmp_path):
    check_values(tmp_path, bitsandbytes_folder(tmp_path, bits))


def test_rejects_incomplete_bitsandbytes_weights(tmp_path):
    held, _ = bitsandbytes_4bit("w", (6, 50), nested=True)
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "bitsandbytes"}}'
    )

    def fails(message: str, **changed: torch.Tensor | None) -> None:
        named = {("w." + key if key != "w" else key): value for key, value in changed.items()}
        kept = {key: value for key, value in {**held, **named}.items() if value is not None}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=rf"^{tmp_path}: .*{message}.*again$"):
            open_folder(tmp_path)

    fails("w.quant_map is missing", quant_map=None)
    fails(
        r"w.absmax is \[5\] torch.float32, w of \[6, 50\] needs 5 elements of torch.uint8",
        absmax=torch.zeros(5),
    )
    fails(r"w is \[3\]", w=torch.zeros(3).byte())
    state = {"quant_state.bitsandbytes__nf4": torch.zeros(4).byte()}
    fails("does not say how w is quantized", **state)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the codes of each row into words of 32 bits, the first code in the lowest bits.

    This is the format of compressed-tensors.
    """
    each = 32 // bits
    wide = torch.zeros(len(codes), -(-codes.shape[1] // each) * each, dtype=torch.int64)
    wide[:, : codes.shape[1]] = codes.long() + 2 ** (bits - 1)
    packed = (wide.view(len(codes), -1, each) << torch.arange(0, 32, bits)).sum(2)
    return packed.to(torch.int32)  # the highest bit is the sign


COMPRESSED = {  # bits, values of a row with one scale, zero points, type
    "packed in groups": (4, 8, True, torch.bfloat16),
    "packed by row": (8, 32, True, torch.float32),
    "packed, symmetric": (4, 16, False, torch.float16),
    "int8": (0, 32, False, torch.bfloat16),
    "int8 with zero points": (0, 8, True, torch.float32),
    "float8": (0, 32, False, torch.bfloat16),
}


def compressed_folder(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Write a model whose layers are quantized, and return its values."""
    bits, group, zeros, dtype = COMPRESSED[kind]
    model = save_model(folder, FAMILY_CONFIGS["llama"])
    held = load_file(folder / "model.safetensors")
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, weight in list(held.items()):
        if ".layers." not in name or weight.dim() != 2:
            continue
        stem, (rows, columns), most = name.removesuffix(".weight"), weight.shape, 2 ** (bits or 8)
        codes = torch.randint(-most // 2, most // 2, (rows, columns))
        scales = torch.rand(rows, columns // min(group, columns)).to(dtype)
        offsets = torch.randint(-most // 2, most // 2, scales.shape) if zeros else None
        if kind == "float8":
            codes = weight.to(torch.float8_e4m3fn)
        wide = scales.repeat_interleave(columns // scales.shape[1], 1)
        numbers = codes.to(dtype)
        if offsets is not None:
            numbers = numbers - offsets.repeat_interleave(columns // scales.shape[1], 1).to(dtype)
        values[name] = (numbers * wide).float()
        held |= {f"{stem}.weight_scale": scales, f"{stem}.input_scale": torch.ones(1)}
        if bits:
            del held[name]
            held[f"{stem}.weight_packed"] = words(codes, bits)
            held[f"{stem}.weight_shape"] = torch.tensor([rows, columns])
        else:
            held[name] = codes if kind == "float8" else codes.to(torch.int8)
        if offsets is not None:
            packed = words(offsets.t(), bits).t().contiguous() if bits else offsets.to(torch.int8)
            held[f"{stem}.weight_zero_point"] = packed
    save_file(held, folder / "model.safetensors")
    set_config(folder, quantization_config={"quant_method": "compressed-tensors"})
    return values


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_tensors_weights_match_formula(kind, tmp_path):
    check_values(tmp_path, compressed_folder(tmp_path, kind))


def test_compressed_tensors_that_cannot_be_taken_are_refused(tmp_path):
    scale, shape = torch.ones(4, 1), torch.tensor([4, 32])
    good = {
        "w.weight_packed": words(torch.zeros(4, 32), 4),
        "w.weight_scale": scale,
        "w.weight_shape": shape,
    }

    def fails(message: str, changed: dict[str, torch.Tensor | None], **config: object) -> None:
        kept = {key: value for key, value in {**good, **changed}.items() if value is not None}
        save_file(kept, tmp_path / "model.safetensors")
        raw = {"quantization_config": {"quant_method": "compressed-tensors", **config}}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ModelError, match=rf"^{tmp_path}: .*{message}"):
            open_folder(tmp_path)

    fails("'nvfp4-pack-quantized'", {}, format="nvfp4-pack-quantized")
    fails("'sparse-24-bitmask'", {}, sparsity_config={"format": "sparse-24-bitmask"})
    fails("'transforms'", {}, transform_config={"config_groups": {}, "r": 1})
    fails("w.weight_g_idx orders its groups", {"w.weight_g_idx": torch.zeros(32)})
    fails("not 2, 4 or 8 bits", {"w.weight_shape": None})
    fails("not 2, 4 or 8 bits", {"w.weight_packed": torch.zeros(4, 3, dtype=torch.int32)})
    fails("w.weight_scale has no w.weight", {"w.weight_packed": None})
    fails("are not one for equal parts", {"w.weight_scale": torch.ones(4, 5)})
    fails("need 1 elements", {"w.weight_zero_point": torch.zeros(4, 1, dtype=torch.int32)})


def test_only_what_a_range_needs_is_read(tmp_path, monkeypatch):
    """Only rows of a matrix are read or, for transposed MXFP4, one expert, once."""
    read: list[int] = []
    pread = safetensors._pread

    def counted(entry, piece, offset):
        read.append(piece.nbytes)
        pread(entry, piece, offset)

    monkeypatch.setattr(safetensors, "_pread", counted)
    monkeypatch.setattr(quantized, "_PIECE_ELEMENTS", 128)
    packed, scales = fp8(torch.randn(4096, 64))
    tensors = open_folder(one_weight(tmp_path, packed, scales, list(BLOCK)))
    tensors.read_flat("w", 64 * 1000 + 3, 64 * 1000 + 700)
    assert sum(read) < 20 * 64 * 2 and max(read) <= 3 * 64
    read.clear()
    experts = {
        "w_blocks": torch.zeros(5, 8, 2, 16, dtype=torch.uint8),
        "w_scales": torch.zeros(5, 8, 2, dtype=torch.uint8),
    }
    save_file(experts, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    open_folder(tmp_path).read("w")
    assert read == [8 * 2 * 16, 8 * 2] * 5


GROUPED_SIZES = {  # config.json, type of scales
    "gptq": ({"bits": 4, "group_size": 8}, torch.float16),
    "gptq, ordered": ({"bits": 4, "group_size": 16, "desc_act": True}, torch.bfloat16),
    "gptq, one group": ({"bits": 8, "group_size": -1}, torch.float16),
    "gptq, zeros as they are": (
        {"bits": 2, "group_size": 16, "checkpoint_format": "gptq_v2"},
        torch.float32,
    ),
    "awq": ({"bits": 4, "group_size": 8, "version": "gemm"}, torch.float16),
}


def grouped_folder(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Write a model whose layers are quantized as AutoGPTQ and AutoAWQ do; return its values.

    The values are computed by the published formula, one element at a time.
    """
    text, dtype = GROUPED_SIZES[kind]
    bits, awq = text["bits"], kind == "awq"
    model = save_model(folder, FAMILY_CONFIGS["llama"])
    held = load_file(folder / "model.safetensors")
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, weight in list(held.items()):
        if ".layers." not in name or weight.dim() != 2:
            continue
        stem, (outputs, inputs) = name.removesuffix(".weight"), weight.shape
        group = text["group_size"] if text["group_size"] > 0 else inputs
        codes = torch.randint(0, 2**bits, (inputs, outputs))
        groups = torch.arange(inputs) // group
        if text.get("desc_act"):
            groups = groups[torch.randperm(inputs)]
        scales = torch.rand(inputs // group, outputs).to(dtype)
        zeros = torch.randint(0, 2**bits, scales.shape)
        wide = [
            [
                (int(codes[i, o]) - int(zeros[groups[i], o])) * scales[groups[i], o]
                for i in range(inputs)
            ]
            for o in range(outputs)
        ]
        values[name] = torch.tensor(wide, dtype=dtype).float()
        stored = zeros - (0 if awq or "v2" in text.get("checkpoint_format", "") else 1)
        stored = stored & (2**bits - 1)
        del held[name]
        if awq:  # a word has eight outputs, the even ones first
            order = torch.arange(outputs).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
            packed, stored = plain_words(codes[:, order], bits), stored[:, order]
        else:
            packed = plain_words(codes.t(), bits).t().contiguous()
            held[f"{stem}.g_idx"] = groups.to(torch.int32)
        held |= {
            f"{stem}.qweight": packed,
            f"{stem}.scales": scales,
            f"{stem}.qzeros": plain_words(stored, bits),
        }
    save_file(held, folder / "model.safetensors")
    set_config(folder, quantization_config={"quant_method": kind.split(",")[0], **text})
    return values


def plain_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return `words` of codes that begin at 0."""
    return words(codes - 2 ** (bits - 1), bits)


@pytest.mark.parametrize("kind", GROUPED_SIZES)
def test_gptq_and_awq_weights_match_formula(kind, tmp_path):
    check_values(tmp_path, grouped_folder(tmp_path, kind))


def test_gptq_and_awq_that_cannot_be_taken_are_refused(tmp_path):
    grouped_folder(tmp_path, "gptq")
    file, settings = tmp_path / "model.safetensors", {"quant_method": "gptq", "group_size": 8}
    whole = load_file(file)
    name = next(n for n in whole if n.endswith("q_proj.qweight"))
    stem = name.removesuffix(".qweight")
    for wrong, message in (
        ({"bits": 3}, "gptq with 3 bits as 'gptq', LoHan takes 2 and 4 and 8 bits"),
        ({"bits": 4, "checkpoint_format": "marlin"}, "as 'marlin'"),
        ({"bits": 4, "group_size": 16}, r"are not one for each of \d groups"),
        ({"quant_method": "awq", "bits": 8}, "awq with 8 bits as 'gemm'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "as 'gemv'"),
    ):
        set_config(tmp_path, quantization_config={**settings, **wrong})
        with pytest.raises(ModelError, match=message):
            open_folder(tmp_path)
    set_config(tmp_path, quantization_config={**settings, "bits": 4})
    save_file({n: t for n, t in whole.items() if n != f"{stem}.qzeros"}, file)
    with pytest.raises(ModelError, match="the download is not complete"):
        open_folder(tmp_path)
    save_file({**whole, "model.layers.0.mlp.act.scales": torch.ones(4)}, file)
    with pytest.raises(ModelError, match=r"mlp\.act\.scales scales activations"):
        open_folder(tmp_path)


@pytest.mark.parametrize("method", ["hqq", "quanto"])
def test_other_methods_are_refused_by_name(method, tmp_path):
    save_model(tmp_path, FAMILY_CONFIGS["llama"])
    set_config(tmp_path, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ModelError, match=rf"quantized \({method}\).*fp8, mxfp4, .*; give the"):
        load_config(tmp_path)


def test_gguf_without_config_is_refused(tmp_path):
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for given in (tmp_path, file):
        with pytest.raises(ModelError, match=rf"^{given}: .*GGUF, without the config.json"):
            load_config(given)


def test_rejects_scales_and_settings_that_do_not_match(tmp_path):
    packed, scales = fp8(torch.randn(32, 24))

    def fails(message: str, tensors: dict[str, torch.Tensor], **said: object) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        raw = {"quantization_config": said} if said else {}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ModelError, match=rf"^{tmp_path}: .*{message}.*again$"):
            open_folder(tmp_path)

    both = {"w": packed, "w_scale_inv": scales}
    how = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    fails("w is torch.float8_e4m3fn and has no w_scale_inv", {"w": packed}, **how)
    fails(
        r"w_scale_inv \[2, 2\], which are not one for each block of \[16, 7\]",
        {"w": packed[:, :7].clone(), "w_scale_inv": scales[:, :2].clone()},
        **{**how, "weight_block_size": [16, 7]},
    )
    fails("weight_block_size 16, two numbers", both, **{**how, "weight_block_size": 16})
    fails("w_scale_inv says that the weights are quantized, config.json has no", both)
    fails(
        "w_blocks has no w_scales",
        {"w_blocks": torch.zeros(1, 2, 1, 16, dtype=torch.uint8)},
        quant_method="mxfp4",
    )
    fails(
        r"w_scales \[1, 2, 2\], which are not one for each 32 values",
        {
            "w_blocks": torch.zeros(1, 2, 1, 16, dtype=torch.uint8),
            "w_scales": torch.zeros(1, 2, 2, dtype=torch.uint8),
        },
        quant_method="mxfp4",
    )
