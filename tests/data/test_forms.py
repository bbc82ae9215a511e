"""Common forms of data: ShareGPT, comma-separated values, tools, templates by name, mixtures."""

import gzip
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lohan.config import Config, load_config
from lohan.data import Dataset, Encoder, encode_row, prepare, reading
from lohan.data.dataset import BLOCK, Mixture
from lohan.data.supervised import Preferences
from lohan.errors import ConfigError, DataError
from lohan.train.language import CausalLM
from lohan.train.preference import Preference
from lohan.util.settings import Source
from tests.support.model_folders import (
    model_dir_fixture,  # noqa: F401 - a fixture
    spelled_row,
    write_jsonl,
)

CHATML = (
    "{% for t in tools or [] %}{{ t['name'] }};{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
ROWS = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(6)]

Models = Callable[..., Path]


@pytest.mark.parametrize("turns", [TURNS, MESSAGES, json.dumps(TURNS)])
def test_share_gpt_is_the_same_chat(model_dir: Models, turns: Any) -> None:
    folder = model_dir(template=CHATML)
    assert spelled_row(folder, {"conversations": turns}) == spelled_row(
        folder, {"messages": MESSAGES}
    )


def test_unknown_speakers_are_named(model_dir: Models) -> None:
    with pytest.raises(DataError, match=r"turn 2 is from 'robot'; known are human, user, system"):
        spelled_row(
            model_dir(template=CHATML),
            {
                "conversations": [TURNS[0], {"from": "robot", "value": "x"}],
            },
        )


def test_a_system_column_comes_first(model_dir: Models) -> None:
    folder = model_dir(template=CHATML)
    first = {"role": "system", "content": "be kind"}
    wanted = spelled_row(folder, {"messages": [first, *MESSAGES]})
    assert spelled_row(folder, {"messages": MESSAGES, "system": "be kind"}) == wanted
    row = {"instruction": "hi", "output": "yo", "system": "be kind"}
    assert spelled_row(folder, row) == wanted


ONE, TWO = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ONE], "completion": [TWO]},
        {"prompt": "q", "response": "a"},
        {"instruction": "q", "response": "a", "context": ""},
        {"question": "q", "response": "a"},
        {"instruction": "q", "input": "", "output": "a", "history": []},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, TWO]},
        {"messages": [ONE, {"role": "assistant", "content": "a", "weight": 1}]},
    ],
)
def test_other_names_and_forms_of_the_same(row: Any, model_dir: Models) -> None:
    folder = model_dir(template=CHATML)
    assert spelled_row(folder, row) == spelled_row(folder, {"messages": [ONE, TWO]})


def test_includes_context_history_and_system_prompt_without_loss(model_dir: Models) -> None:
    """A context, earlier turns, a system prompt: none is left out. Loss is on the answer alone."""
    row = {
        "instruction": "i",
        "context": "c",
        "response": "a",
        "history": [["h", "o"]],
        "system_prompt": "s",
    }
    text, shown = spelled_row(model_dir(template=CHATML), row)
    turns = [("system", "s"), ("user", "h"), ("assistant", "o"), ("user", "i\n\nc")]
    before = "".join(f"<|im_start|>{role}\n{message}<|im_end|>\n" for role, message in turns)
    assert text.startswith(f"{before}<|im_start|>assistant\na<|im_end|>")
    assert shown.replace("~", "") == "a<|im_end|>"


def test_turns_of_no_weight_carry_no_loss(model_dir: Models) -> None:
    messages = [ONE, {**TWO, "content": "z", "weight": 0}, ONE, {**TWO, "weight": 1}]
    text, shown = spelled_row(model_dir(template=CHATML), {"messages": messages})
    assert "z" in text and shown.replace("~", "") == "a<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"message 1: its content has a part that is no text \(image_url\)",
        ),
        ({"instruction": "q", "output": "a", "history": ["h"]}, "history must be a list of pairs"),
        ({"prompt": "q", "completion": "a", "label": False}, "label false is rated, .* --loss kto"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "for pairs of answers add --task pref"),
    ],
)
def test_parts_that_cannot_be_read(row: Any, message: str, model_dir: Models) -> None:
    with pytest.raises(DataError, match=message):
        spelled_row(model_dir(template=CHATML), row)


@pytest.mark.parametrize("tools", [[{"name": "clock"}], '[{"name": "clock"}]'])
def test_templates_see_tools(model_dir: Models, tools: Any) -> None:
    folder = model_dir(template=CHATML)
    text, shown = spelled_row(folder, {"messages": MESSAGES, "tools": tools})
    assert text.startswith("clock;<|im_start|>user")
    assert shown.strip("~") == "yo<|im_end|>"
    assert not spelled_row(folder, {"messages": MESSAGES})[0].startswith("clock")


def test_templates_by_name_and_file(model_dir: Models, tmp_path: Path) -> None:
    template_file = tmp_path / "own.jinja"
    template_file.write_text("{% for m in messages %}{{ m['content'] }}|{% endfor %}")
    for name, begins in (("alpaca", "### Instruction:\nhi"), (str(template_file), "hi|yo|")):
        encoder = Encoder(model_dir(), template=name)
        ids, _ = encode_row({"messages": MESSAGES}, encoder=encoder, place="x")
        assert encoder.tokenizer("x").decode(ids).startswith(begins)
    with pytest.raises(DataError, match="neither one of chatml, llama-3, alpaca nor a file"):
        Encoder(model_dir(), template="nowhere").tokenizer("x")


def tokens(dataset: Dataset) -> list[list[int]]:
    return [dataset.example(index)[0].tolist() for index in range(dataset.summary.examples)]


def test_the_same_rows_in_every_kind_of_file(model_dir: Models, tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": 'with, "marks"\nand lines', "completion": "a\tb"}]
    lines = [
        "prompt,completion",
        *(",".join('"' + row[key].replace('"', '""') + '"' for key in row) for row in rows),
    ]
    files = {
        "a.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "b.json": json.dumps(rows),
        "c.jsonl": json.dumps(rows, indent=1),
        "d.csv": "\n".join(lines) + "\n",
        "e.tsv": "\n".join(line.replace('","', '"\t"') for line in lines).replace(
            "prompt,completion", "prompt\tcompletion"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    folder = tmp_path / "downloaded"  # two shards, another split, and what is about the data
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("data")
    (folder / "dataset_infos.json").write_text("{}")
    for name, part in (("train-0", rows[:3]), ("train-1", rows[3:]), ("test-0", rows)):
        (folder / "data" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    collected = []
    for name in (*files, *(f"{name}.gz" for name in files), folder.name):
        prepared = prepare(
            tmp_path / name, model_dir=model_dir(), cache_dir=tmp_path / f"{name}.c", seq=64
        )
        collected.append(tokens(prepared))
    assert len(collected[0]) == len(rows) and len(collected) == 11
    assert all(one == collected[0] for one in collected)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.json.gz", "folder", "a.txt"])
def test_end_of_a_file_is_reported_once(name: str, tmp_path: Path) -> None:
    """This includes files that are read in a single block, since displays rely on it."""
    rows, messages = [{"prompt": "a", "completion": "b"}] * 200, []
    text = json.dumps(rows) if ".json." in f"{name}." else "prompt,completion\n" + "a,b\n" * 200
    text = "".join(json.dumps(row) + "\n" for row in rows) if name == "a.jsonl" else text
    source = tmp_path / name
    if name == "folder":
        source.mkdir()
        for part in "12":
            (source / f"{part}.csv").write_text(text)
    else:
        source.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    read = reading.text_blocks if name == "a.txt" else reading.read_rows
    for _ in read(source, lambda *seen: messages.append(seen)):
        assert not messages or messages[-1][0] < messages[-1][1]
    assert (
        messages[-1][0] == messages[-1][1] and sum(done == total for done, total in messages) == 1
    )


def test_folders_and_packed_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, message in {
        "test.jsonl": "none for training by its name; name the files: --data .*test.jsonl",
        "train.csv": "",
        "train.jsonl": "has files of several kinds, .csv, .jsonl; name those to train on",
    }.items():
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / name).write_text("{}")
        if message:
            with pytest.raises(DataError, match=message):
                reading.data_files(tmp_path / "d")
        else:
            assert reading.data_files(tmp_path / "d") == [tmp_path / "d" / name]
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"text": "abc"}\n' * 99)[:-12])
    with pytest.raises(DataError, match=r"cut.jsonl.gz: cannot be unpacked: .*download or pack it"):
        list(reading.read_rows(cut, lambda done, total: None))
    refusals = (("a.parquet.gz", "unpack it: gunzip"), ("a.zip", "also compressed, as in"))
    for name, message in refusals:
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(DataError, match=message):
            prepare(tmp_path / name, model_dir=tmp_path, cache_dir=tmp_path / "c", seq=8)


@pytest.mark.parametrize("block", [1, 7, 2**20])
def test_lists_are_read_in_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, block: int
) -> None:
    monkeypatch.setattr(reading, "JSON_BLOCK_BYTES", block)
    rows = [{"text": "a\u00e4\U0001f600" * 9, "n": 12345}, {"text": ""}, {"deep": [[1.5e3, None]]}]
    file = tmp_path / "d.json"
    file.write_text("\ufeff" + json.dumps(rows, indent=2, ensure_ascii=False))
    assert [row for _, row in reading.read_rows(file, lambda done, total: None)] == rows


def test_rows_of_csv_with_another_number_of_values(tmp_path: Path) -> None:
    file = tmp_path / "d.csv"
    file.write_text("prompt,completion\na,b,c\n")
    with pytest.raises(
        DataError, match="row 2: 3 values for 2 columns; quote values that hold a ','"
    ):
        list(reading.read_rows(file, lambda done, total: None))


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_several_processes_make_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
    model_dir: Models,
    tmp_path: Path,
    start: str,
) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", *(ROWS * 30))
    alone = prepare(source, model_dir=model_dir(), cache_dir=tmp_path / "one", seq=64)
    monkeypatch.setattr(reading, "PARALLEL_BYTES", 1)
    monkeypatch.setattr(reading, "PROCESSES", 2)
    monkeypatch.setattr(reading, "START", start)
    monkeypatch.setattr(reading.os, "cpu_count", lambda: 2)
    several = prepare(source, model_dir=model_dir(), cache_dir=tmp_path / "two", seq=64)
    assert tokens(several) == tokens(alone)


# -- mixtures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a.jsonl:2", "a.jsonl", "c:1.jsonl", "b.jsonl:3"])
def test_files_and_weights(tmp_path: Path, text: str) -> None:
    (tmp_path / "b.jsonl:3").touch()
    wanted = Source(tmp_path / text)
    if text == "a.jsonl:2":
        wanted = Source(tmp_path / "a.jsonl", 2.0)
    actual = configured(str(tmp_path / text)).data
    assert actual == (wanted,)
    assert str(actual[0]) == str(tmp_path / text)


def configured(*data: str) -> Config:
    return load_config(None, overrides={"model": "m", "data": [*data], "out": "o"})


def test_configs_with_several_files_come_back() -> None:
    for data in (["/a.jsonl:2", "/b.jsonl:0.5"], ["/a.jsonl", "/b.jsonl"], ["/a.jsonl"]):
        result = configured(*data)
        again = Config.from_mapping(tomllib.loads(result.to_toml()), base_dir=Path("/elsewhere"))
        assert again == result
    assert 'data = "/a.jsonl"' in result.to_toml()  # one file stands as it always did


def mixed(folder: Path, tmp_path: Path, *weights: float | None, seq: int = 64) -> Dataset:
    sources = []
    for number, weight in enumerate(weights):
        rows = [{"prompt": f"{number}", "completion": f"{i}"} for i in range(5 + 10 * number)]
        sources.append(Source(write_jsonl(tmp_path / f"{number}.jsonl", *rows), weight))
    cache = tmp_path / f"c{weights}{seq}"
    return prepare(sources, model_dir=folder, cache_dir=cache, seq=seq, seed=3)


def test_without_weights_every_example_comes_once(model_dir: Models, tmp_path: Path) -> None:
    result = mixed(model_dir(), tmp_path, None, None)
    assert len(result) == 20
    assert sorted(int(i) for s in range(5) for i in result.indices(s, 4)) == list(range(20))


def test_shares_hold_whatever_the_sizes(model_dir: Models, tmp_path: Path) -> None:
    result = mixed(model_dir(), tmp_path, 3.0, 1.0)
    rows = np.concatenate([result.indices(step, 10) for step in range(BLOCK // 10)])
    assert np.count_nonzero(rows < 5) == 750
    # Within a source, every example comes once before any comes again.
    small = [int(row) for row in rows if row < 5]
    assert all(sorted(small[i : i + 5]) == list(range(5)) for i in range(0, 750, 5))
    # A step's rows are what they are whatever was asked before; batches of another size cut the
    # same sequence, so ranks that share a batch see it too.
    assert result.indices(7, 10).tolist() == rows[70:80].tolist()
    assert np.concatenate([result.indices(s, 4) for s in range(20)]).tolist() == rows[:80].tolist()


def test_shares_hold_after_a_split_and_packing(model_dir: Models, tmp_path: Path) -> None:
    train, held = mixed(model_dir(), tmp_path, 1.0, 1.0).split(0.2)
    packed = train.pack()
    assert packed.packed
    assert len(packed) < len(train)
    for item in (train, packed):
        rows = np.concatenate([item.indices(step, 10) for step in range(BLOCK // 10)])
        first = [item.rows[int(row)][0] < 5 for row in rows]  # type: ignore[index]
        assert sum(first) == 500
    both = {int(i) for part in (train, held) for i in part.rows.members}  # type: ignore[union-attr]
    assert both == set(range(20))


def test_a_small_share_is_not_rounded_away() -> None:
    mixture = Mixture((10, 10, 10), (1e-9, 1.0, 1.0))
    assert mixture.shares.tolist() == [1, 500, 499]


def test_some_files_with_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"/b.jsonl has no weight and other files have"):
        configured("/a.jsonl:1", "/b.jsonl")
    with pytest.raises(ConfigError, match="a weight above 0, not 0"):
        configured("/a.jsonl:0")


def test_weights_are_part_of_the_cache(model_dir: Models, tmp_path: Path) -> None:
    result = mixed(model_dir(), tmp_path, 1.0, 2.0)
    sources = [Source(tmp_path / "0.jsonl", 1.0), Source(tmp_path / "1.jsonl", 5.0)]
    other = prepare(sources, model_dir=model_dir(), cache_dir=result.folder, seq=64, seed=3)
    assert other.weights == (1.0, 5.0)


def test_the_first_example_is_shown(model_dir: Models, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", *ROWS)
    prepared = prepare(
        source, model_dir=model_dir(), cache_dir=tmp_path / "c", seq=64, template="alpaca"
    )
    assert prepared.rendered["template"] == "alpaca"
    assert prepared.rendered["prompt"] == "### Instruction:\nq0\n\n### Response:\n"
    assert prepared.rendered["answer"].startswith("a0")


@pytest.mark.parametrize("pairs", [False, True])
def test_tools_that_a_template_does_not_show_and_files_of_a_folder(
    pairs: bool,
    model_dir: Models,
    tmp_path: Path,
) -> None:
    row: dict[str, Any] = {"prompt": "hi", "chosen": "yo", "rejected": "no"}
    row = row if pairs else {"messages": MESSAGES}
    folder = tmp_path / "d"
    for number in range(2):
        folder.mkdir(exist_ok=True)
        write_jsonl(folder / f"train-{number}.jsonl", {**row, "tools": [{"name": "clock"}]}, row)
    plain = CHATML.partition("{% endfor %}")[2]
    for template, reported in ((plain, True), (CHATML, False)):
        prepared = prepare(
            folder,
            model_dir=model_dir(template=template),
            cache_dir=tmp_path / f"c{reported}",
            seq=64,
            preferences=pairs,
        )
        config = load_config(
            None,
            overrides={
                "model": "m",
                "data": str(folder),
                "out": "o",
                "train.batch": 5,
                "train.seq": 64,
            },
        )
        task, of = (
            (Preference(), Preferences(prepared, np.arange(4), 5))
            if pairs
            else (CausalLM(), prepared)
        )
        text = task.describe(of, config)  # type: ignore[arg-type]
        assert f"{folder}: 2 files, train-0.jsonl to train-1.jsonl" in text
        assert ("examples with tools" in text) is reported
        assert f"warning: 4 {'pairs' if pairs else 'examples'} and a batch of 5" in text


def test_warnings_say_what_is_missing(model_dir: Models, tmp_path: Path) -> None:
    rows = [*ROWS[:2], {"messages": [{"role": "user", "content": "x" * 90}, *MESSAGES[1:]]}]
    source = write_jsonl(tmp_path / "d.jsonl", *rows)
    prepared = prepare(
        source, model_dir=model_dir(template=CHATML), cache_dir=tmp_path / "c", seq=64
    )
    config = load_config(
        None,
        overrides={
            "model": "m",
            "data": str(source),
            "out": "o",
            "train.batch": 4,
            "train.seq": 64,
        },
    )
    text = CausalLM().describe(prepared, config)
    assert "warning: 1 of 3 examples dropped: their first 64 tokens hold no answer" in text
    assert "warning: 2 examples and a batch of 4: a step sees some of them more than once" in text
    assert text.endswith("  >>>a0<|im_end|>")
