"""Hostile files are refused with one message each and execute nothing."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lohan.checkpoint.adapters import named_base
from lohan.checkpoint.hf_folder import load_config
from lohan.checkpoint.safetensors import TensorFolder
from lohan.cli import main
from lohan.config import load_config as load_settings
from lohan.data.images import _array, square
from lohan.data.reading import read_examples
from lohan.data.text import Encoder
from lohan.device import ranks
from lohan.device.ranks import Heartbeat, MissedBeats, count_of, local_rendezvous
from lohan.errors import ConfigError, DataError, LohanError, ModelError, StoreError
from lohan.model.layout import RankInfo
from lohan.planner import presets
from lohan.store.admin import describe
from lohan.store.extents import Region
from lohan.store.files import LOCK, StoreLock, lock_holder
from lohan.store.io_engine import aligned_buffer
from lohan.store.manifest import _canonical, checksum
from lohan.store.store import Store
from lohan.util.display import printable
from lohan.util.files import read_object

DEEP = "[" * 100_000
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


# -- the meeting place of ranks -------------------------------------------------------------------


def test_ranks_of_one_machine_meet_on_loopback_only() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = local_rendezvous(RankInfo(0, 2), env)
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):  # one that listens everywhere would answer here
        socket.create_connection(("127.0.0.2", port), timeout=5)
    del place


def test_a_meeting_place_of_torchrun_or_of_a_network_is_left_to_torch() -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert local_rendezvous(RankInfo(0, 2), env) is None
    env = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    assert local_rendezvous(RankInfo(0, 2), env) is None


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"1.5", b"9" * 5000, b"\x1b[2J"])
def test_a_wrong_heartbeat_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: bytes
) -> None:
    class Place:
        def set(self, key: str, text: str) -> None:
            pass

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [b"7", value]

    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(ranks, "BEAT_S", 0.0)
    beating = Heartbeat.__new__(Heartbeat)
    beating._ranks, beating._run, beating._rendezvous = RankInfo(0, 2), "run", Place()
    beating._done, beating._missed_beats, beating._answered_beat = (
        ranks.threading.Event(),
        MissedBeats(2),
        0,
    )
    beating._live()
    assert ended == [2]
    output = capsys.readouterr().err
    assert "where a rank's heartbeat should be" in output and "\x1b" not in output
    assert count_of(b"41") == 41


# -- model folders --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"attn_implementation": "org/repo"},
        {"_attn_implementation": "org/repo@main:layer"},
        {"text_config": {"_attn_implementation": "paged|org/repo"}},
        {"attn_implementation": {"": "eager", "text_config": "org/repo"}},
        {"experts_implementation": "org/repo"},
    ],
)
def test_a_config_may_not_name_code_of_a_hub(tmp_path: Path, more: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | more))
    with pytest.raises(ModelError, match=r"org/repo.*neither fetches nor runs"):
        load_config(tmp_path)


def test_load_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    from lohan.engine import attach

    seen: list[bool] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(attach, "find_diffusers_folder", lambda folder: None)
    monkeypatch.setattr(
        attach, "build_model", lambda folder, dtype: seen.append(constants.is_offline_mode())
    )
    attach.load(tmp_path)
    assert seen == [True] and not constants.is_offline_mode()


def _weights(folder: Path, header: str, data: bytes = b"") -> None:
    text = header.encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "header",
    [
        DEEP,
        '{"w":' * 5000 + "1" + "}" * 5000,
        json.dumps({"w": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}),
        json.dumps({"w": {"dtype": "F32", "shape": {"a": 1}, "data_offsets": [0, 4]}}),
        json.dumps({"w": {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 4]}}),
        '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, ' + "9" * 5000 + "]}}",
    ],
)
def test_rejects_hostile_headers(tmp_path: Path, header: str) -> None:
    _weights(tmp_path, header, bytes(4))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        json.dumps({"weight_map": {"w": "x" * 5000}}),
        json.dumps({"weight_map": {"w": "a\0b"}}),
        json.dumps({"weight_map": {"w": "\ud800"}}),
        json.dumps({"weight_map": {"w": ["a"]}}),
    ],
)
def test_rejects_hostile_indexes(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize("base", ["x" * 5000, "a\0b", "\ud800", "", ["a"], None])
def test_base_named_by_an_adapter_must_be_local(tmp_path: Path, base: object) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    with pytest.raises(ModelError, match=r"adapter_config\.json: names .* no model folder here"):
        named_base(tmp_path)


def test_rejects_deeply_nested_configs(tmp_path: Path) -> None:
    for text in (DEEP, '{"a":' * 500 + "1" + "}" * 500):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json.*nested"):
            load_config(tmp_path)


def test_a_config_with_too_many_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 2**40}))
    with pytest.raises(ModelError, match=r"num_hidden_layers is .*, more than"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        presets.model(tmp_path)


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    with file.open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(ConfigError, match="more than"):
        read_object(file, kind=ConfigError, remedy="remove it")


# -- the terminal ---------------------------------------------------------------------------------


def test_names_with_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.fail(LohanError("tensor \x1b]0;owned\x07\x1b[2J\x9b31m \ud800 is missing"))
    output = capsys.readouterr().err
    assert end.value.code == 2 and "is missing" in output
    assert not {"\x1b", "\x07", "\x9b"} & set(output.replace("\x1b[31m", "").replace("\x1b[0m", ""))
    assert printable("a\n\tb\x1b") == "a\n\tb\ufffd"


# -- data -----------------------------------------------------------------------------------------


def _npy(header: bytes, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize(
    "content",
    [
        _npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000)}\n"),
        _npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}\n"),
        _npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"(" * 5000),
        _npy(b"{'descr': [], 'fortran_order': False, 'shape': ()}\n"),
        _npy(b"\xff\xfe{"),
        b"\x93NUMPY\x09\x00",
        b"",
    ],
)
def test_rejects_hostile_npy_files(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.npy"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npy: "):
        _array(file)


def test_npy_that_is_an_archive(tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", b"x")
    with pytest.raises(DataError, match=r"a\.npy: "):
        _array(file)


def test_valid_npy_files_are_read(tmp_path: Path) -> None:
    for array in (np.arange(6, dtype="f4").reshape(2, 3), np.asfortranarray(np.eye(3)[:2])):
        np.save(tmp_path / "a.npy", array)
        np.testing.assert_array_equal(_array(tmp_path / "a.npy"), array)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, *chunks: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + b"".join(chunks) + _chunk(b"IEND", b"")


LARGE, DAMAGED = "has more than 64,000,000 pixels", "not readable as an image"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_png(60_000, 60_000, _chunk(b"IDAT", zlib.compress(bytes(9)))), LARGE),
        (_png(9_000, 9_000, _chunk(b"IDAT", zlib.compress(bytes(9)))), LARGE),
        (_png(1, 1, _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**26)))), DAMAGED),
        (_png(1, 1, _chunk(b"IDAT", b"x")), DAMAGED),
    ],
)
def test_rejects_hostile_images(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.png: {message}"):
        square(file, 8)


def test_tables_with_columns_of_other_types(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    file = tmp_path / "t.parquet"
    for kind in (
        pa.binary(),
        pa.timestamp("s"),
        pa.decimal128(5, 1),
        pa.date32(),
        pa.duration("s"),
    ):
        values = [b"x"] if kind == pa.binary() else [1]
        pa.parquet.write_table(pa.table({"text": pa.array(values, kind)}), file)
        with pytest.raises(DataError, match="text must be text, got a value of type"):
            list(read_examples(file, encoder=Encoder(tmp_path), seq=8, progress=None))


# -- stores ---------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Path:
    place = tmp_path / "s"
    with Store.create(place, [Region("a", (4096,))]) as result:
        result.wait(result.write("a", 0, aligned_buffer(4096)))
        result.commit({"progress": {"step": 3}})
    return place


def _resealed(file: Path, key: str, value: Any) -> None:
    fields = json.loads(file.read_bytes())
    del fields["crc32c"]
    if value is ...:
        del fields[key]
    else:
        fields[key] = value
    file.write_bytes(_canonical({**fields, "crc32c": checksum(_canonical(fields))}))


WRONG: list[Any] = [None, True, -5, 2**70, 1.5, "x", "\0", [], [1], {}, {"a": [1]}, ...]
KEYS = {
    "store.json": ("uuid", "index", "count", "dirs", "layout"),
    "manifest.json": (
        *("uuid", "generation", "durability", "clean", "count", "layout_sha256"),
        *("sums_crc32c", "meta"),
    ),
}


@pytest.mark.parametrize(("name", "key"), [(n, key) for n, keys in KEYS.items() for key in keys])
def test_rejects_store_files_with_values_of_wrong_types(store: Path, name: str, key: str) -> None:
    right = (store / name).read_bytes()
    for value in WRONG:
        (store / name).write_bytes(right)
        if (key, value) in (("uuid", "x"), ("meta", {}), ("clean", True), ("meta", {"a": [1]})):
            continue  # of the right type
        if json.loads(right)[key] == value and type(json.loads(right)[key]) is type(value):
            continue
        _resealed(store / name, key, value)
        with pytest.raises(StoreError):
            describe(store)
            Store.open(store).close()


@pytest.mark.parametrize("extents", [[["0", 0, 4096]], [[0, 0]], [[0, -4096, 4096]], [0], "x"])
def test_a_layout_with_wrong_extents(store: Path, extents: Any) -> None:
    entry = {"key": "a", "scratch": False, "fixed": False, "extents": extents}
    _resealed(store / "store.json", "layout", [entry])
    with pytest.raises(StoreError):
        describe(store)


@pytest.mark.parametrize("meta", [{"progress": 3}, {"progress": {"step": "x"}}, {"commits": []}])
def test_a_meta_of_wrong_types(store: Path, meta: dict[str, Any]) -> None:
    _resealed(store / "manifest.json", "meta", meta)
    with pytest.raises(StoreError, match=r"manifest\.json: cannot be understood \(meta"):
        describe(store)


@pytest.mark.parametrize("digits", [20, 5000])
def test_a_long_number_in_a_lock_file(tmp_path: Path, digits: int) -> None:
    (tmp_path / LOCK).write_text("9" * digits)
    assert lock_holder(tmp_path) is None
    with (tmp_path / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert str(lock_holder(tmp_path)).startswith("999")
        with pytest.raises(StoreError, match="in use by process 999"):
            StoreLock([tmp_path])


def test_numbers_beyond_floats_in_settings(tmp_path: Path) -> None:
    big = "1" + "0" * 400
    for line in (f"[budget]\nhost = {big}\n", f"[train]\nlr = {big}\n"):
        file = tmp_path / "run.toml"
        file.write_text(f'model = "m"\ndata = "d"\nout = "o"\n{line}')
        with pytest.raises(ConfigError):
            load_settings(file)
