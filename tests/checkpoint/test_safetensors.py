"""Safetensors streaming: both ways against the safetensors library, and every broken file named."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lohan.checkpoint.safetensors import (
    DTYPES,
    FileTensor,
    ShardedWriter,
    TensorFolder,
    shard_tensors,
)
from lohan.errors import ModelError, StorageIOError


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.arange(torch.Size(shape).numel()).reshape(shape) - 3
    if dtype == torch.bool:
        return raw % 2 == 0
    return (raw.clamp(min=0) if not dtype.is_signed else raw).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().flatten().view(torch.uint8).tolist()
        == b.contiguous().flatten().view(torch.uint8).tolist()
    )


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    every = {f"t.{code}": sample(dtype, (3, 5)) for code, dtype in DTYPES.items()}
    return {**every, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}


def write_all(folder: Path, tensors: dict[str, torch.Tensor], **options: int) -> None:
    specs = [FileTensor(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    with ShardedWriter(folder, tensors=specs, **options) as writer:
        for name, tensor in tensors.items():
            for piece in tensor.reshape(-1).split(4):
                writer.write(name, piece)


def raw_file(file: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_reads_what_the_library_wrote(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder = TensorFolder(tmp_path)
    assert sorted(folder.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        assert folder.shape(name) == tuple(tensor.shape)
        assert folder.dtype(name) == tensor.dtype
        assert same(folder.read(name), tensor)
        assert same(folder.read_flat(name, 0, 0), tensor.reshape(-1)[:0])
    assert same(folder.read_flat("t.I16", 4, 11), tensors["t.I16"].reshape(-1)[4:11])


def test_the_library_reads_what_we_wrote(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_all(tmp_path, tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(same(loaded[name], tensors[name]) for name in tensors)


def test_shards_and_index(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_all(tmp_path, tensors, max_shard_bytes=150)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    folder = TensorFolder(tmp_path)
    assert all(same(folder.read(name), tensors[name]) for name in tensors)
    for shard in shards:
        for name, tensor in load_file(tmp_path / shard).items():
            assert index["weight_map"][name] == shard
            assert same(tensor, tensors[name])


def test_a_tensor_above_the_limit_has_its_own_shard() -> None:
    specs = [FileTensor(n, torch.float32, (k,)) for n, k in (("a", 1), ("b", 9), ("c", 1))]
    shards = shard_tensors(specs, max_shard_bytes=8)
    assert [[spec.name for spec in shard] for shard in shards.values()] == [["a"], ["b"], ["c"]]


def test_writer_checks_every_element(tmp_path: Path) -> None:
    specs = [FileTensor("w", torch.float32, (4,))]
    with (
        pytest.raises(ValueError, match="w: 3 of 4 elements"),
        ShardedWriter(tmp_path, tensors=specs) as writer,
    ):
        writer.write("w", torch.zeros(3))
    assert list(tmp_path.iterdir()) == []
    for piece in (torch.zeros(5), torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="w: "), ShardedWriter(tmp_path, tensors=specs) as w:
            w.write("w", piece)
    with pytest.raises(ValueError, match="same name"):
        ShardedWriter(tmp_path, tensors=specs * 2)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_named_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if offset >= 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(StorageIOError, match=r"model.safetensors: writing 4,096 bytes .* No space"),
        ShardedWriter(tmp_path, tensors=[FileTensor("w", torch.float32, (1024,))]) as writer,
    ):
        writer.write("w", torch.zeros(1024))
    assert list(tmp_path.iterdir()) == []


def test_short_writes_and_reads_are_continued(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:5]], at))
    write_all(tmp_path, tensors)
    folder = TensorFolder(tmp_path)
    assert all(same(folder.read(name), tensors[name]) for name in tensors)


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"w": entry(0, 16, [4])}, 12, r"tensor w ends at byte \d+, the file at \d+"),
        ({"w": entry(0, 16, [4])}, 20, r"tensors end at byte \d+, the file at \d+"),
        ({"w": entry(0, 16, [5])}, 16, r"tensor w of shape \[5\] needs 20 bytes.*hold 16"),
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12, r"tensor b at byte \d+ overlaps a"),
        ({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, 20, r"tensor b .* gap after a"),
        ({"w": entry(0, 4, [1], "F128")}, 4, r"tensor w has dtype 'F128'.*convert"),
        ({"w": entry(-4, 0, [1])}, 4, r"tensor w has no usable shape"),
        ({"w": {"dtype": "F32"}}, 4, r"tensor w has no usable shape"),
        (["w"], 0, r"not the expected JSON"),
        (b"{broken", 0, r"not the expected JSON"),
    ],
)
def test_broken_headers(tmp_path: Path, header: object, size: int, message: str) -> None:
    raw_file(tmp_path / "model.safetensors", header, bytes(size))
    with pytest.raises(ModelError, match=rf"model\.safetensors: .*{message}"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x10\0\0", b"\xff" * 8, (10**6).to_bytes(8, "little")])
def test_truncated_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=rf"bytes announced in a file of {len(content)} bytes"):
        TensorFolder(tmp_path)


def test_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1000)}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(ModelError, match=r"tensor w: file ends at byte 2,000, [\d,]+ expected"):
        folder.read("w")


def test_read_error_names_file_tensor_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageIOError, match=r"tensor w: reading 16 bytes at \d+ failed: Input"):
        folder.read("w")


def test_index_problems(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    save_file({"w": torch.zeros(4)}, tmp_path / "model-00001-of-00002.safetensors")
    shards = {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelError, match=r"names 2 shards, 1 of them missing, first model-00002"):
        TensorFolder(tmp_path)
    save_file({"x": torch.zeros(4)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"places tensor v in model-00002"):
        TensorFolder(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json: cannot be read as an index"):
        TensorFolder(tmp_path)


def test_folders_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        TensorFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin only.*save_pretrained"):
        TensorFolder(tmp_path)


def test_wrong_names_and_ranges(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    assert "w" in folder and "v" not in folder
    with pytest.raises(ModelError, match="no tensor v among 1"):
        folder.read("v")
    with pytest.raises(ValueError, match=r"2\.\.5 outside 0\.\.4"):
        folder.read_flat("w", 2, 5)
