"""Damaged and hostile files for everything that LoHan reads: success or a LohanError, nothing else.

python benchmarks/fuzz.py --inputs 100000 --seed 0
python benchmarks/fuzz.py --inputs 2000 --kind npy --kind gguf

Valid files of every kind are changed: bytes flipped, cut, doubled and replaced; in JSON also values
exchanged for others of a wrong type, size or depth, with the checksum put right where the format
has one. A finding is any exception but LohanError, more than 10 seconds of the processor for an
input (or 100 of the clock), or more than 1 GiB of memory. Input number N of a kind is the same for
the same seed.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lohan.errors import LohanError

SECONDS = 10
ROOM = 2**30  # Bytes that an input may take in addition to the memory of the process.
SHOWN = 20  # Findings that are printed in full.

Read = Callable[[bytes], object]  # writes the bytes to a file and reads them


@dataclass(frozen=True)
class Kind:
    """A kind of file: valid examples, and how to read one.

    JSON files are mutated as JSON, and `seal` recomputes their checksum.
    """

    name: str
    seeds: Sequence[bytes]
    read: Read
    is_json: bool = False
    seal: Callable[[Any], bytes] = lambda value: json.dumps(value).encode()


@dataclass
class Tally:
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    tracebacks: int = 0
    hangs: int = 0
    large: int = 0
    findings: Counter[str] = field(default_factory=Counter)

    @property
    def clean(self) -> bool:
        return not (self.tracebacks or self.hangs or self.large)


# -- changes --------------------------------------------------------------------------------------

HOSTILE: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**25,
    0.5,
    -1e9,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../x",
    "/",
    "\x1b[31mred\x07",
    "\x00",
    "\ud800",
    "x" * 5000,
    "1e999",
    [],
    [[]],
    {},
    [1, 2, 3],
    ["a"],
    {"a": 1},
    [None],
    {"": None},
    [[1, [2, [3]]]],
    "org/kernel",
]
INTERESTING = (b"\x00", b"\xff", b"\x7f", b"{", b"[", b'"', b"\\", b"\x1b[2J", b"9" * 30, b"-1")


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.choice((1, 2, 4, 8, 64, 1024)))
        what = rng.randrange(6)
        if what == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del out[at:]
        elif what == 2:
            out[at:at] = out[at:end]
        elif what == 3:
            out[at:end] = rng.choice(INTERESTING)
        elif what == 4:
            out[at:end] = rng.randbytes(end - at)
        else:
            del out[at:end]
    return bytes(out)


def change_json(value: Any, rng: random.Random) -> Any:
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return rng.choice(HOSTILE)
        holder, key = rng.choice(places)
        what = rng.randrange(8)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif what == 1:
            holder[f"{key}{rng.randrange(9)}"] = holder[key]
        elif what == 2:
            holder[key] = _nested(rng.choice((5, 70, 200)))
        elif what == 3:
            other, at = rng.choice(places)
            if at in other if isinstance(other, dict) else at < len(other):
                holder[key] = copy.deepcopy(other[at])
        elif what == 4 and isinstance(holder[key], int):
            holder[key] = int(holder[key]) + rng.choice((-1, 1, 2**20, -(2**20), 2**40))
        else:
            holder[key] = copy.deepcopy(rng.choice(HOSTILE))
    return value


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    if isinstance(value, (dict, list)):
        for key, item in list(items):
            yield value, key
            if isinstance(item, (dict, list)):
                yield from _places(item)


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def changed(kind: Kind, rng: random.Random) -> bytes:
    data = rng.choice(kind.seeds)
    if rng.randrange(200) == 0:
        return rng.choice((b"", b"\x00" * 64, b"[" * 100_000, b'{"a":' * 50_000, b"9" * 20_000))
    if kind.is_json and rng.randrange(4):
        return kind.seal(change_json(json.loads(data), rng))
    return change_bytes(data, rng)


# -- kinds ----------------------------------------------------------------------------------------


def file_reader(file: Path, read: Callable[[], object]) -> Read:
    def run(data: bytes) -> object:
        file.write_bytes(data)
        return read()

    return run


def all_kinds(work: Path) -> list[Kind]:
    created = [*model_kinds(work), *data_kinds(work), *store_kinds(work), *settings_kinds(work)]
    created += [*log_kinds(work), *mark_kinds(work), *packed_kinds(work), *adapter_kinds(work)]
    return [*created, *vision_kinds(work)]


def _safetensors(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
}
HEADER = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
    "__metadata__": {"format": "pt"},
}


def model_kinds(work: Path) -> list[Kind]:
    from lohan.checkpoint.hf_folder import load_config
    from lohan.checkpoint.safetensors import TensorFolder
    from lohan.data.text import load_tokenizer
    from lohan.planner import presets

    one, many, config, tokens = (work / name for name in ("one", "many", "config", "tokenizer"))
    for folder in (one, many, config, tokens):
        folder.mkdir()
    weights = _safetensors(HEADER, bytes(24))
    (many / "s.safetensors").write_bytes(weights)
    index = {"metadata": {}, "weight_map": {"a": "s.safetensors", "b": "s.safetensors"}}

    def read_all(folder: Path) -> None:
        tensors = TensorFolder(folder)
        for name in tensors.names():
            tensors.read(name)

    def read_config() -> None:
        try:
            presets.model(config)
        finally:
            load_config(config)

    (tokens / "config.json").write_text(json.dumps(CONFIG))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "b",
        "unk_token": "a",
        "model_max_length": 32,
        "chat_template": "{{ messages }}",
    }
    vocab = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    }
    (tokens / "tokenizer.json").write_text(json.dumps(vocab))
    return [
        Kind(
            "safetensors",
            [weights],
            file_reader(one / "model.safetensors", partial(read_all, one)),
            is_json=False,
        ),
        Kind(
            "safetensors header",
            [json.dumps(HEADER).encode()],
            file_reader(one / "model.safetensors", partial(read_all, one)),
            is_json=True,
            seal=lambda header: _safetensors(header, bytes(24)),
        ),
        Kind(
            "index",
            [json.dumps(index).encode()],
            file_reader(many / "model.safetensors.index.json", partial(read_all, many)),
            is_json=True,
        ),
        Kind(
            "config",
            [json.dumps(CONFIG).encode()],
            file_reader(config / "config.json", read_config),
            is_json=True,
        ),
        Kind(
            "tokenizer settings",
            [json.dumps(settings).encode()],
            file_reader(
                tokens / "tokenizer_config.json",
                partial(load_tokenizer, tokens, needed_by="this benchmark"),
            ),
            is_json=True,
        ),
    ]


PREFERENCES = [
    {"prompt": "a", "chosen": "b", "rejected": "a a"},
    {
        "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}],
    },
    {"prompt": "a", "completion": "b", "label": True},
]


TASK_ROWS = [
    {"input": "a", "target": "b"},
    {"text": "a b", "label": 1},
    {"sentence": "a", "label": "0.5"},
    {"tokens": ["a", "b"], "tags": [0, "b"]},
    {"question": "a", "context": "a b a", "answers": {"text": ["b"], "answer_start": [2]}},
]


def npy(array: Any) -> bytes:
    import numpy as np

    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def picture(form: str, **more: Any) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (9, 7), (200, 10, 90)).save(out, format=form, **more)
    return out.getvalue()


def tables() -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet

    def table(name: str, *values: Any) -> bytes:
        out = io.BytesIO()
        pa.parquet.write_table(pa.table({name: pa.array(*values)}), out)
        return out.getvalue()

    return [
        table("input_ids", [[1, 2], [3, 4]]),
        table("text", [b"a", b"b"]),
        table("text", [1, 2], pa.timestamp("s")),
        table("text", [1, 2], pa.decimal128(5, 1)),
    ]


def task_rows(work: Path, file: Path) -> None:
    """Check that a row is accepted by each task that it has the keys of, or refused by all."""
    from lohan.data import supervised
    from lohan.data.reading import read_rows
    from lohan.data.text import Encoder

    texts, classes = supervised.Texts, supervised.Classes
    named = texts(Encoder(work / "tokenizer"), 8, classes({"a": 0, "b": 1}, 2, False), 64)
    number = texts(named.encoder, 8, classes({}, 1, False), 64)
    for place, row in read_rows(file, lambda done, total: None):
        refused = []
        for task in ("pair", "class", "tags", "question"):
            for how in (named, number):
                try:
                    list(getattr(supervised, f"encode_{task}")(row, how, place))
                except LohanError as error:
                    refused.append(error)
        if len(refused) == 8:
            raise refused[0]


def restoring(file: Path, use: Callable[[], object]) -> Read:
    """Use a file with other content, and restore its content afterwards."""
    right = file.read_bytes()

    def run(given: bytes) -> None:
        file.write_bytes(given)
        try:
            use()
        finally:
            file.write_bytes(right)

    return run


def data_kinds(work: Path) -> list[Kind]:
    import numpy as np
    from PIL import PngImagePlugin

    from lohan.data.images import _array, _tensors, square
    from lohan.data.reading import read_examples
    from lohan.data.text import Encoder
    from lohan.train.generation import read_prompts

    note = PngImagePlugin.PngInfo()
    note.add_text("note", "x" * 200, zip=True)
    rows = [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"text": "a b"},
        {"messages": [{"role": "user", "content": "a"}]},
        {"prompt": "a", "completion": "b"},
    ]

    def examples(file: Path, **how: bool) -> None:
        encoder = Encoder(work / "tokenizer")
        (work / "tokenizer" / "tokenizer_config.json").unlink(missing_ok=True)
        for _ in read_examples(file, encoder=encoder, seq=8, progress=None, **how):
            pass

    def reading(name: str, read: Callable[[Path], object]) -> Read:
        return file_reader(work / name, lambda: read(work / name))

    latents = _safetensors({"latents": HEADER["a"]}, bytes(16))
    lines = [json.dumps(row).encode() for row in rows]
    return [
        Kind("npy", [npy(np.ones((2, 3), "f4")), npy(np.ones(4, "i8"))], reading("a.npy", _array)),
        Kind("latents", [latents], reading("l.safetensors", _tensors)),
        Kind(
            "png",
            [picture("PNG"), picture("PNG", pnginfo=note)],
            reading("a.png", lambda file: square(file, 8)),
        ),
        Kind("jpeg", [picture("JPEG")], reading("a.jpg", lambda file: square(file, 8))),
        Kind("parquet", tables(), reading("t.parquet", examples)),
        Kind("jsonl", lines, reading("t.jsonl", examples), is_json=True),
        Kind(
            "csv",
            [b'text\na b\n"a, ""b"""\n', b"prompt,completion\na,b\n"],
            reading("t.csv", examples),
        ),
        Kind("tsv", [b"text\na b\n", b"prompt\tcompletion\na\tb\n"], reading("t.tsv", examples)),
        Kind(
            "task rows",
            [json.dumps(row).encode() for row in TASK_ROWS],
            reading("k.jsonl", partial(task_rows, work)),
            is_json=True,
        ),
        Kind(
            "preferences",
            [json.dumps(row).encode() for row in PREFERENCES],
            reading("r.jsonl", partial(examples, preferences=True)),
            is_json=True,
        ),
        Kind(
            "prompts",
            [json.dumps(["a", {"prompt": "b"}]).encode()],
            reading("p.json", lambda file: read_prompts([str(file)])),
            is_json=True,
        ),
    ]


def store_kinds(work: Path) -> list[Kind]:
    from torch import nn

    from lohan.checkpoint.resharding import StoreSet
    from lohan.checkpoint.store_io import store_reader
    from lohan.checkpoint.train_state import TrainState, restore_buffers
    from lohan.model.layout import FlatGroup, TensorSpec
    from lohan.model.state import regions, state_format_of, stored_model
    from lohan.optim import DEFAULT_KIND
    from lohan.store.admin import describe
    from lohan.store.io_engine import aligned_buffer
    from lohan.store.manifest import _canonical, check_members, checksum, locate, read_committed
    from lohan.store.store import Store

    group = FlatGroup("block0", (TensorSpec("w", (16, 16), 0, 256, True, True),), 2048)
    layout = [{"key": "block0", "numel": 2048, "tensors": [["w", [16, 16], 0, 256, True, True]]}]
    meta = {
        **TrainState.start("fp32").to_meta(),
        "mode": "fp32",
        "chunk_params": 2048,
        "layout": layout,
        "kind": {"optimizer": "adamw", "moments": "fp32", "ema": False},
        "buffers": {"running_mean": ["float32", [2], "AACAPwAAgD8="]},
        "metrics": {"step": 1, "loss": 2.0},
    }
    place = work / "store"
    parts = regions((group,), state_format=state_format_of("fp32", DEFAULT_KIND), chunk_params=2048)
    with Store.create(place, parts) as store:
        for region in store.layout.regions:
            buffer = aligned_buffer(region.chunks[0])
            buffer[:] = 0
            store.wait(store.write(region.key, 0, buffer))
        store.commit(meta)
    module = nn.BatchNorm1d(2)

    def use() -> None:
        StoreSet(((place,),)).step()
        describe(place)
        paths, primary = locate(place)
        check_members(paths, primary)
        read_committed(paths, primary)
        with Store.open(place) as store:
            TrainState.of(store.meta)
            restore_buffers(module, store.meta)
            read = store_reader(store)
            for group in stored_model(store.meta, store.layout.regions).groups:
                for tensor in group.tensors:
                    read(tensor.name, 0, 4)

    def sealed(value: Any) -> bytes:
        if not isinstance(value, dict):
            return json.dumps(value).encode()
        body = {key: item for key, item in value.items() if key != "crc32c"}
        return _canonical({**body, "crc32c": checksum(_canonical(body))})

    files = [place / name for name in ("store.json", "manifest.json")]
    actual = [
        Kind(file.name, [file.read_bytes()], restoring(file, use), is_json=True, seal=sealed)
        for file in files
    ]
    return [
        *actual,
        Kind("lock", [b"1234\n"], file_reader(place / "lock", lambda: describe(place))),
    ]


RUN_TOML = """
model = "m"
data = "d.jsonl"
seed = 1
out = "o"
[train]
batch = 2
seq = 8
lr = 1e-5
steps = 3
[budget]
host = "1GiB"
ssd = ["/tmp"]
"""


RECIPE = """
base_model: m  # of another trainer
sequence_len: 2048
datasets: [{path: d, type: alpaca}]
started: 2026-11-17 07:00:00
lora_r: !!int "8"
flags: &flags {bf16: yes, tf32: ~}
more: *flags
"""


def settings_kinds(work: Path) -> list[Kind]:
    from lohan.cli.recipes import refuse_yaml
    from lohan.config import load_config
    from lohan.model.plan import LedgerEntry, Plan
    from lohan.planner import presets
    from lohan.train.inputs import activation_policy_of

    profile = presets.machine(presets.machine_names()[0])
    plan = Plan(
        dtype="fp32",
        micro_batch=None,
        chunk_params=2048,
        head_tokens=8,
        weight_slots=2,
        kept=(("inputs", 1), ("mlp", (0, 2))),
        host_cached_state=(("block0", 0),),
        ledger=(LedgerEntry("host", "weights", 4096),),
    )

    def reading(name: str, read: Callable[[Path], object]) -> Read:
        return file_reader(work / name, lambda: read(work / name))

    return [
        Kind("run settings", [RUN_TOML.encode()], reading("run.toml", load_config)),
        Kind("recipe", [RECIPE.encode()], reading("recipe.yaml", refusing_reader(refuse_yaml))),
        Kind("profile", [profile.to_toml().encode()], reading("machine.toml", presets.machine)),
        Kind(
            "plan",
            [json.dumps({"plan": plan.to_json()}).encode()],
            reading("plan.json", lambda file: activation_policy_of(str(file))),
            is_json=True,
        ),
    ]


def refusing_reader(refuse: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return a reader that accepts the refusal of a file as settings of another trainer."""

    def read(file: Path) -> None:
        try:
            refuse(file)
        except LohanError as error:
            if "settings of another trainer" not in str(error):
                raise

    return read


def log_kinds(work: Path) -> list[Kind]:
    from lohan.train.run_folder import RunFolder, repair_logs
    from lohan.ui.report import page
    from lohan.ui.runs import read_run
    from lohan.ui.traces import read_traces
    from lohan.ui.view import Advice

    run = RunFolder(work / "run")
    run.path.mkdir()
    run.config_file.write_text(RUN_TOML)
    step = {
        "step": 1,
        "loss": 2.0,
        "lr": 1e-5,
        "tokens_per_s": 10.0,
        "step_s": 0.5,
        "rss_bytes": 10**9,
        "ssd_read_bytes": 10,
        "ssd_written_bytes": 10,
        "busy": {"compute": 0.5},
        "binding": "compute",
        "grad_norm": 1.0,
    }
    run.metrics_file.write_text(json.dumps(step) + "\n")
    start = {
        "event": "start",
        "step": 0,
        "total": 3,
        "shape": {"batch": 2, "seq": 8},
        "versions": {"lohan": "1"},
        "machine": {"node": "n", "memory_bytes": 9},
    }
    event = {"name": "E", "ph": "X", "pid": 0, "tid": 0, "ts": 1.0, "dur": 2.0}
    trace = {"traceEvents": [event]}

    def read_logs() -> None:
        result = read_run(run)
        page([(result, Advice([]))])
        repair_logs(run, step=1, last=[])

    def log(file: Path) -> Read:
        right = file.read_bytes() if file.exists() else b""

        def one(data: bytes) -> None:
            file.write_bytes(data + b"\n")
            try:
                read_logs()
            finally:
                file.write_bytes(right)

        return one

    return [
        Kind("metrics", [json.dumps(step).encode()], log(run.metrics_file), is_json=True),
        Kind("journal", [json.dumps(start).encode()], log(run.journal), is_json=True),
        Kind(
            "trace",
            [json.dumps(trace).encode()],
            file_reader(run.trace, lambda: read_traces(run)),
            is_json=True,
        ),
    ]


def mark_kinds(work: Path) -> list[Kind]:
    """Return the marks of run folders, of finished runs and of exports."""
    from lohan.checkpoint import replacing
    from lohan.train.run_folder import MARK, Finished, Mark, RunFolder, check_exports, finished_at

    run = RunFolder(work / "marked")
    run.model.mkdir(parents=True)
    run.config_file.write_text(RUN_TOML)
    (run.model / "config.json").write_text("{}")
    ended = Finished(3, 3, "0" * 64, {"model": "0" * 64})
    Mark("0123", "lohan-marked-0123", ("model", "run.toml"), ended).write(run.path)
    replacing.write_mark(run.model, "0123")

    def use() -> None:
        config = run.config()
        finished_at(run, config)
        check_exports(run, config)

    def whole(name: str, file: Path) -> Kind:
        right, read = file.read_bytes(), file_reader(file, use)

        def one(data: bytes) -> None:
            try:
                read(data)
            finally:
                file.write_bytes(right)

        return Kind(name, [right], one, is_json=True)

    return [
        whole("run mark", run.path / MARK),
        whole("export mark", run.model / replacing.MARK),
    ]


def read_all(folder: Path) -> None:
    from lohan.checkpoint.quantized import open_folder

    tensors = open_folder(folder)
    for name in tensors.names():
        tensors.read(name)


def packed_kinds(work: Path) -> list[Kind]:
    """Return checkpoints whose weights are dequantised: their configs and their files."""
    import torch
    from safetensors.torch import save

    def folder_of(method: str, tensors: dict[str, Any], **settings: Any) -> list[Kind]:
        folder = work / method
        folder.mkdir()
        config = {**CONFIG, "quantization_config": {"quant_method": method, **settings}}
        weights = save(tensors)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(weights)
        length = int.from_bytes(weights[:8], "little")
        header, data = weights[8 : 8 + length], weights[8 + length :]
        use = partial(read_all, folder)
        return [
            Kind(
                f"{method} config",
                [json.dumps(config).encode()],
                restoring(folder / "config.json", use),
                is_json=True,
            ),
            Kind(
                f"{method} header",
                [header],
                restoring(folder / "model.safetensors", use),
                is_json=True,
                seal=lambda changed: _safetensors(changed, data),
            ),
        ]

    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 16]}
    four_bits = {
        "w": torch.zeros(64, 1, dtype=torch.uint8),
        "w.absmax": torch.ones(2),
        "w.quant_map": torch.zeros(16),
    }
    eight_bits = {"v.weight": torch.zeros(4, 4, dtype=torch.int8), "v.SCB": torch.ones(4)}

    def held(state: Any) -> dict[str, torch.Tensor]:
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return {**four_bits, **eight_bits, "w.quant_state.bitsandbytes__nf4": text}

    result = folder_of("bitsandbytes", held(state))
    result.append(
        Kind(
            "bitsandbytes state",
            [json.dumps(state).encode()],
            restoring(
                work / "bitsandbytes" / "model.safetensors",
                partial(read_all, work / "bitsandbytes"),
            ),
            is_json=True,
            seal=lambda changed: save(held(changed)),
        )
    )
    result += folder_of(
        "compressed-tensors",
        {
            "w.weight_packed": torch.zeros(4, 4, dtype=torch.int32),
            "w.weight_scale": torch.ones(4, 2),
            "w.weight_shape": torch.tensor([4, 32]),
            "v.weight": torch.zeros(4, 8, dtype=torch.int8),
            "v.weight_scale": torch.ones(4, 1),
            "v.weight_zero_point": torch.zeros(4, 1),
        },
        format="pack-quantized",
        config_groups={
            "group_0": {
                "weights": {"num_bits": 4, "type": "int", "block_structure": None},
                "targets": ["Linear"],
            }
        },
    )
    result += folder_of(
        "fp8",
        {
            "w.weight": torch.zeros(4, 8).to(torch.float8_e4m3fn),
            "w.weight_scale_inv": torch.ones(2, 2),
        },
        weight_block_size=[2, 4],
    )
    return [*result, *gguf_kinds(work)]


def gguf_kinds(work: Path) -> list[Kind]:
    try:
        import gguf
    except ImportError:
        return []
    import numpy as np

    folder = work / "gguf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    file, types = folder / "model.gguf", gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(16)
    writer.add_head_count(2)
    writer.add_array("names", ["a", "b"])
    for name, shape, kind in (
        ("token_embd.weight", (64, 16), types.F16),
        ("blk.0.attn_q.weight", (16, 16), types.F32),
        ("blk.0.ffn_down.weight", (16, 32), types.Q8_0),
        ("output_norm.weight", (16,), types.F32),
    ):
        values = gguf.quants.quantize(np.ones(shape, np.float32), kind)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [Kind("gguf", [file.read_bytes()], file_reader(file, partial(read_all, folder)))]


def adapter_kinds(work: Path) -> list[Kind]:
    """Return the files of a PEFT folder, opened over a model without weights in memory."""
    try:
        import peft
    except ImportError:
        return []
    import torch

    from lohan.checkpoint.adapters import named_base, open_adapter
    from lohan.checkpoint.hf_folder import build_from_config, load_config

    base, folder = work / "adapter-base", work / "adapter"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(CONFIG))
    config = load_config(base)
    model = build_from_config(config, dtype=torch.float32).to_empty(device="cpu")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, lora).save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(base)
    weights = (folder / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(weights[:8], "little")

    def use() -> None:
        named_base(folder)
        open_adapter(build_from_config(config, dtype=torch.float32), folder)

    def whole(name: str, right: bytes) -> Read:
        (folder / name).write_bytes(right)

        def run(given: bytes) -> None:
            (folder / name).write_bytes(given)
            try:
                use()
            finally:
                (folder / name).write_bytes(right)

        return run

    text = json.dumps(settings).encode()
    file = whole("adapter_model.safetensors", weights)
    return [
        Kind("adapter config", [text], whole("adapter_config.json", text), is_json=True),
        Kind("adapter weights", [weights], file),
        Kind(
            "adapter header",
            [weights[8 : 8 + length]],
            file,
            is_json=True,
            seal=lambda header: _safetensors(header, weights[8 + length :]),
        ),
    ]


def vision_kinds(work: Path) -> list[Kind]:
    """Return rows of conversations about images, in the form that a processor accepts."""
    from PIL import Image

    from lohan.data.images import Conversations, load_processor, rows_with_images
    from lohan.data.reading import read_rows
    from tests.support.model_folders import save_llava

    folder, file = work / "llava", work / "v.jsonl"
    save_llava(folder)
    Image.new("RGB", (9, 7), (200, 10, 90)).save(work / "v.png")
    processor = load_processor(folder)
    answer = {"role": "assistant", "content": "b"}
    parts = [{"type": "image", "path": "v.png"}, {"type": "text", "text": "a"}]
    rows = [
        {"images": ["v.png"], "messages": [{"role": "user", "content": "<image>a"}, answer]},
        {"messages": [{"role": "user", "content": parts}, answer]},
        {
            "image": "v.png",
            "conversations": [
                {"from": "human", "value": "<image>a"},
                {"from": "gpt", "value": "b"},
            ],
        },
    ]

    def use() -> None:
        result = Conversations(processor, folder, 64)
        for _ in rows_with_images(read_rows(file, lambda done, total: None), file, result):
            pass

    lines = [json.dumps(row).encode() for row in rows]
    return [Kind("vision rows", lines, file_reader(file, use), is_json=True)]


# -- running --------------------------------------------------------------------------------------


class TooLong(BaseException):
    """Raised when reading takes too long; not an Exception, so that readers do not catch it."""


@contextmanager
def within(seconds: int) -> Any:
    """Limit a block to `seconds` of processor time, and to ten times as many of the clock."""
    cpu_s, clock_s = time.process_time(), time.monotonic()

    def end(number: int, frame: object) -> None:
        late = time.monotonic() - clock_s >= 10 * seconds
        if late or time.process_time() - cpu_s >= seconds:
            raise TooLong
        signal.alarm(1)

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def limited_memory(room: int) -> Any:
    """Limit the address space of this process, so that allocations beyond `room` fail."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def try_one(kind: Kind, data: bytes, tally: Tally, keep: Callable[[str], None]) -> None:
    tally.inputs += 1
    try:
        with within(SECONDS):
            kind.read(data)
        tally.accepted += 1
    except LohanError as error:
        tally.refused += 1
        if "memory" in str(error) and isinstance(error.__context__, MemoryError):
            tally.large += 1
            keep(f"large: {error}")
    except TooLong:
        tally.hangs += 1
        keep(f"more than {SECONDS} s")
    except MemoryError:
        tally.large += 1
        keep("large: " + traceback.format_exc())
    except Exception:
        tally.tracebacks += 1
        keep(traceback.format_exc())


def fuzz(
    work: Path,
    *,
    inputs: int,
    seed: int,
    only: Sequence[str] = (),
    findings: Path | None = None,
    minutes: float = math.inf,
) -> dict[str, Tally]:
    """Test `inputs` inputs, spread evenly over the kinds, or as many as the time allows."""
    end_s = time.monotonic() + 60 * minutes
    warnings.simplefilter("ignore")
    kinds = [kind for kind in all_kinds(work) if not only or kind.name in only]
    tallies = {kind.name: Tally() for kind in kinds}
    for kind in kinds:  # The first read of a kind imports many modules.
        kind.read(kind.seal(json.loads(kind.seeds[0])) if kind.is_json else kind.seeds[0])
    with limited_memory(ROOM):
        for number in range(inputs):
            if time.monotonic() > end_s:
                break
            kind = kinds[number % len(kinds)]
            data = changed(kind, random.Random(f"{seed} {kind.name} {number // len(kinds)}"))
            tally = tallies[kind.name]

            def keep(
                what: str, data: bytes = data, kind: Kind = kind, tally: Tally = tally
            ) -> None:
                last = what.strip().splitlines()
                short = " | ".join((last[-3].strip() if len(last) > 2 else "", last[-1]))[:300]
                tally.findings[short] += 1
                if findings is not None and tally.findings[short] == 1:
                    name = f"{kind.name.replace(' ', '-')}-{len(tally.findings)}"
                    (findings / name).write_bytes(data)
                    (findings / f"{name}.txt").write_text(what)

            try_one(kind, data, tally, keep)
    return tallies


def table(tallies: dict[str, Tally]) -> str:
    lines = [
        f"{'kind':26} {'inputs':>8} {'accepted':>9} {'refused':>8} {'tracebacks':>11} "
        f"{'hangs':>6} {'large':>6}"
    ]
    for name, t in tallies.items():
        lines.append(
            f"{name:26} {t.inputs:8} {t.accepted:9} {t.refused:8} {t.tracebacks:11} {t.hangs:6} "
            f"{t.large:6}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="in all, over all kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="at most so many")
    parser.add_argument("--kind", action="append", default=[], help="only these; may be repeated")
    parser.add_argument("--findings", type=Path, help="folder to write inputs with findings to")
    options = parser.parse_args()
    if options.findings:
        options.findings.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="lohan-fuzz-"))
    try:
        tallies = fuzz(
            work,
            inputs=options.inputs,
            seed=options.seed,
            only=options.kind,
            findings=options.findings,
            minutes=options.minutes,
        )
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(table(tallies))
    print(f"{sum(tally.inputs for tally in tallies.values()):,} inputs")
    actual = [(n, f"{k}: {what}") for k, t in tallies.items() for what, n in t.findings.items()]
    for count, what in sorted(actual, reverse=True)[:SHOWN]:
        print(f"{count:6} x {what}")
    sys.exit(0 if all(tally.clean for tally in tallies.values()) else 1)


if __name__ == "__main__":
    from lohan.util.libraries import set_up_libraries

    set_up_libraries()
    main()
