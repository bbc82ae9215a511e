"""Data: every form of example token by token, every refusal, order, padding and the cache.

The tokenizer here has one token per byte and a few special ones, so that what a test expects can
be written down as text.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lohan.data as data
from lohan.data import IGNORE, Dataset, Encoder, encode_row, open_dataset, prepare
from lohan.errors import DataError
from tests.support.model_folders import (
    CHATML_TEMPLATE,
    model_dir_fixture,  # noqa: F401 - a fixture
    spelled_row,
    spelled_tokens,
    write_jsonl,
)

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Nothing closes a turn, and the prompt's last space could merge with what follows.
PLAIN = (
    "{% for m in messages %}{{ m['role'][0] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}"
)
# As Qwen3: earlier answers are rendered differently from the last one.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# No prefix of a conversation is rendered as a prefix of the text.
COUNTING = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
REFUSING = "{{ raise_exception('roles must alternate') }}"


rows = st.lists(
    st.lists(st.tuples(st.integers(0, 999), st.booleans()), max_size=20), min_size=1, max_size=20
)


# ---------------------------------------------------------------- forms of examples


def test_text_has_loss_everywhere_and_ends(model_dir: Callable[..., Path]) -> None:
    assert spelled_row(model_dir(), {"text": "ab"}) == ("ab<|im_end|>",) * 2
    assert spelled_row(model_dir(bos=True), {"text": "ab"}) == ("<s>ab<|im_end|>",) * 2


def test_prompt_and_completion_without_template_are_joined_as_they_are(
    model_dir: Callable[..., Path],
) -> None:
    row = {"prompt": "1+1=", "completion": "2"}
    assert spelled_row(model_dir(), row) == ("1+1=2<|im_end|>", "~~~~2<|im_end|>")
    assert spelled_row(model_dir(bos=True), row) == ("<s>1+1=2<|im_end|>", "~~~~~2<|im_end|>")


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "q?", "answer": "yes"}, "q?"),
        ({"instruction": "q?", "output": "yes"}, "q?"),
        ({"instruction": "q?", "input": "", "output": "yes"}, "q?"),
        ({"instruction": "q?", "input": None, "output": "yes"}, "q?"),
        ({"instruction": "q?", "input": "in", "output": "yes", "text": "old"}, "q?\n\nin"),
    ],
)
def test_question_without_template(
    model_dir: Callable[..., Path], row: dict[str, Any], prompt: str
) -> None:
    before = f"### Question:\n{prompt}\n\n### Answer:\n"
    assert spelled_row(model_dir(), row) == (
        f"{before}yes<|im_end|>",
        "~" * len(before) + "yes<|im_end|>",
    )


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q?", "answer": "yes"},
        {"prompt": "q?", "completion": "yes"},
        {"instruction": "q?", "output": "yes"},
        {"messages": [{"role": "user", "content": "q?"}, {"role": "assistant", "content": "yes"}]},
    ],
)
@pytest.mark.parametrize("template", [CHATML_TEMPLATE, TAGGED])
def test_template_is_used_where_there_is_one(
    model_dir: Callable[..., Path], row: dict[str, Any], template: str
) -> None:
    text, loss = spelled_row(model_dir(template=template), row)
    assert text == "<|im_start|>user\nq?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    hidden = 1 + len("user\nq?") + 1 + 1 + 1 + len("assistant\n")
    assert loss == "~" * hidden + "yes<|im_end|>~"


TURNS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "A2"},
]


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, TAGGED])
def test_every_assistant_turn_has_loss(model_dir: Callable[..., Path], template: str) -> None:
    encoder = Encoder(model_dir(template=template))
    ids, labels = encode_row({"messages": TURNS}, encoder=encoder, place="")
    assert spelled_tokens(encoder, ids, labels)[1].replace("~", "") == "A1<|im_end|>A2<|im_end|>"
    assert encoder.skipped_turns == 0


def test_turn_after_the_last_answer_has_no_loss(model_dir: Callable[..., Path]) -> None:
    _, loss = spelled_row(model_dir(template=CHATML_TEMPLATE), {"messages": TURNS[:4]})
    assert loss.replace("~", "") == "A1<|im_end|>"
    assert loss.endswith("~~")


def test_template_that_closes_nothing_gets_the_end_token(model_dir: Callable[..., Path]) -> None:
    text, loss = spelled_row(model_dir(template=PLAIN), {"messages": TURNS[1:]})
    assert text == "u: one\na: A1\nu: two\na: A2\n<|im_end|>"
    assert loss == "~" * 10 + "A1\n" + "~" * 10 + "A2\n<|im_end|>"


def test_token_across_the_border_is_split_as_in_generation(
    model_dir: Callable[..., Path],
) -> None:
    """With a merge of " A", tokens of the prompt are not a prefix of those of the text."""
    folder = model_dir(template=PLAIN, merges=[("Ġ", "A")])
    encoder = Encoder(folder)
    ids, labels = encode_row({"messages": TURNS[1:3]}, encoder=encoder, place="")
    prompt = encoder.ids("u: one\na: ", place="")
    assert ids[: len(prompt)] == prompt
    assert labels[: len(prompt) + 1] == [IGNORE] * len(prompt) + encoder.ids("A", place="")


def test_history_rendered_otherwise_has_no_loss(
    model_dir: Callable[..., Path],
) -> None:
    encoder = Encoder(model_dir(template=THINKING))
    ids, labels = encode_row({"messages": TURNS}, encoder=encoder, place="")
    shown = spelled_tokens(encoder, ids, labels)[1].replace("~", "")
    assert shown == "<think></think>A2<|im_end|>"
    assert encoder.skipped_turns == 1


def test_answer_without_a_question_has_no_loss(model_dir: Callable[..., Path]) -> None:
    _, loss = spelled_row(model_dir(template=CHATML_TEMPLATE), {"messages": TURNS[2:]})
    assert loss.replace("~", "") == "A2<|im_end|>"


def test_tokenized_needs_no_tokenizer(tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "d.jsonl",
        {"input_ids": [1, 2, 3]},
        {"input_ids": [4, 5, 6, 7], "labels": [-100, -100, 6, 7]},
        {"input_ids": [4, 5, 6, 7], "labels": [-100, 5, -100, -100]},
    )
    prepared = prepare(source, model_dir=tmp_path / "none", cache_dir=tmp_path / "c", seq=8)
    assert [[list(part) for part in prepared.example(i)] for i in range(3)] == [
        [[1, 2, 3], [1, 2, 3]],
        [[4, 5, 6, 7], [-100, -100, 6, 7]],
        [[4, 5], [-100, 5]],
    ]
    assert prepared.pad_id == 0
    assert prepared.summary == data.Summary(
        examples=3, tokens=9, trained_tokens=5, longest=4, cut=0, dropped=0, skipped_turns=0
    )


def test_long_examples_are_cut_and_those_without_answer_dropped(tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "d.jsonl",
        {"input_ids": [1, 2, 3, 4, 5]},
        {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, -100, 4]},
        {"input_ids": [1, 2], "labels": [1, -100]},
        {"input_ids": [1]},
        {"input_ids": []},
        {"input_ids": [7, 8, 9]},
    )
    prepared = prepare(source, model_dir=tmp_path, cache_dir=tmp_path / "c", seq=3)
    assert prepared.summary == data.Summary(
        examples=2, tokens=6, trained_tokens=4, longest=3, cut=2, dropped=4, skipped_turns=0
    )


def test_json_list_and_suffix_in_capitals(tmp_path: Path) -> None:
    source = tmp_path / "d.JSON"
    source.write_text(json.dumps([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}], indent=2))
    seen: list[tuple[int, int]] = []
    prepared = prepare(
        source,
        model_dir=tmp_path,
        cache_dir=tmp_path / "c",
        seq=4,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert len(prepared) == 2
    assert seen[-1] == (source.stat().st_size,) * 2


def test_blank_lines_byte_order_mark_and_windows_ends(tmp_path: Path) -> None:
    source = tmp_path / "d.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"input_ids": [1, 2]}\r\n\r\n{"input_ids": [3, 4]}')
    assert len(prepare(source, model_dir=tmp_path, cache_dir=tmp_path / "c", seq=4)) == 2


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("block", [7, 64, 2**18])
def test_txt_is_one_stream_whatever_the_block(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_dir: Callable[..., Path],
    bos: bool,
    block: int,
) -> None:
    monkeypatch.setattr("lohan.data.reading.TEXT_BLOCK_BYTES", block)
    text = "Grüße an alle, 你好 wide world.\r\n\nA line with 3 numbers 42 43.\n" * 9
    source = tmp_path / "d.txt"
    source.write_bytes(text.encode())
    seen: list[tuple[int, int]] = []
    prepared = prepare(
        source,
        model_dir=model_dir(bos=bos),
        cache_dir=tmp_path / "c",
        seq=50,
        progress=lambda done, total: seen.append((done, total)),
    )
    stream = np.concatenate([prepared.example(i)[0] for i in range(len(prepared))])
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir(bos=bos))
    assert list(stream) == tokenizer(text.replace("\r\n", "\n"))["input_ids"]
    lengths = np.diff(prepared.offsets)
    assert (lengths[:-1] == 50).all()
    assert seen[-1] == (source.stat().st_size,) * 2
    assert all(np.array_equal(*prepared.example(i)) for i in range(len(prepared)))


# ---------------------------------------------------------------- refusals


def refusal(source: Path, folder: Path, **options: Any) -> str:
    cache = source.parent / "run" / "data"
    with pytest.raises(DataError) as caught:
        prepare(source, model_dir=folder, cache_dir=cache, **{"seq": 8, **options})
    assert not cache.parent.exists(), "a refused file leaves nothing behind"
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[1, 2", "line 17: not JSON: Expecting ',' delimiter at column 6; each line must be"),
        ("[1, 2]", "line 17: a list, not an object; write"),
        ("null", "line 17: null, not an object"),
        ("true", "line 17: true or false, not an object"),
        ("[" * 99999, "line 17: not usable JSON"),
        ('{"body": "x", "id": 1}', "line 17: no known keys (found: body, id); known are input_ids"),
        ("{}", "line 17: no known keys (found: none)"),
        (
            '{"prompt": "x"}',
            "found: prompt); known are input_ids; messages; conversations; prompt+completion; p",
        ),
        ('{"text": 3}', "line 17: text must be text, got a number"),
        ('{"text": ["a"]}', "line 17: text must be text, got a list"),
        ('{"text": null}', "no known keys"),
        ('{"text": "\\ud83d"}', "line 17: text holds half of a"),
        ('{"instruction": "a", "input": 3, "output": "b"}', "input must be text, got a number"),
        ('{"question": "a", "answer": false}', "answer must be text, got true or false"),
        ('{"input_ids": "1 2"}', "input_ids must be a list of whole numbers"),
        ('{"input_ids": [1, true]}', "input_ids must be a list of whole numbers"),
        ('{"input_ids": [1, 1.0]}', "input_ids must be a list of whole numbers"),
        ('{"input_ids": [1, 99999999999]}', "input_ids has a number beyond 32 bits"),
        ('{"input_ids": [1, 2], "labels": [1]}', "2 input_ids but 1 label; give one label per"),
        ('{"input_ids": [1, 300]}', "line 17: token 300 is outside the model's vocabulary of 300"),
        ('{"input_ids": [1, -1]}', "token -1 is outside"),
        ('{"input_ids": [1, 2], "labels": [1, 301]}', "token 301 is outside"),
        ('{"messages": "hi"}', "messages must be a list of objects, got text"),
        ('{"messages": []}', "messages must be a list of objects, got an empty list"),
        ('{"messages": ["hi"]}', "message 1 must be an object with role and content"),
        ('{"messages": [{"content": "hi"}]}', "message 1 must be an object with role"),
        ('{"messages": [{"role": "user"}]}', "message 1: content must be text, got null"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "a part that is no text (a number)"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "messages need a chat template"),
    ],
)
def test_bad_line_is_named(
    tmp_path: Path, model_dir: Callable[..., Path], row: str, message: str
) -> None:
    source = tmp_path / "d.jsonl"
    good = '{"input_ids": [1, 2]}\n'
    source.write_text(good * 16 + row + "\n" + good)
    got = refusal(source, model_dir(), vocab_size=300)
    assert got.startswith(f"{source}, line 17: ")
    assert message in got
    assert "\n" not in got


def test_source_errors(tmp_path: Path) -> None:
    assert "no such file; check --data" in refusal(tmp_path / "none.jsonl", tmp_path)
    assert "not a file" in refusal(tmp_path, tmp_path)
    odd = tmp_path / "d.xlsx"
    odd.write_bytes(b"a,b")
    assert "unknown kind '.xlsx'; data is read from .txt, .jsonl, .json" in refusal(odd, tmp_path)
    empty = tmp_path / "d.txt"
    empty.touch()
    assert "the file is empty" in refusal(empty, tmp_path)
    blank = tmp_path / "d.jsonl"
    blank.write_text("\n\n")
    assert "holds no examples" in refusal(blank, tmp_path)


def test_rejects_text_that_is_not_utf8(tmp_path: Path, model_dir: Callable[..., Path]) -> None:
    text = tmp_path / "d.txt"
    text.write_bytes(b"abc\xff")
    assert "not UTF-8 text" in refusal(text, model_dir())
    lines = tmp_path / "d.jsonl"
    lines.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert f"{lines}, line 2: not UTF-8 text at byte 10" in refusal(lines, model_dir())
    whole = tmp_path / "d.json"
    whole.write_bytes(b'["\xff"]')
    assert "not UTF-8 text at byte 2" in refusal(whole, model_dir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}', "an object, not a list; put the objects into [ ... ], or rename"),
        ('{"text": "a"}\n{"text": "b"}', "not a list; put the objects into [ ... ], or rename it"),
        ('[{"text": "a"}\n{"text": "b"}]', "line 2: not JSON: Expecting ',' delimiter at column 1"),
        ('[{"text": "a"}] 3', "line 1: not JSON: Extra data at column 17"),
        ('[{"text": "a"},', "line 1: not JSON: Expecting value at column 16"),
        ('[{"text": "a"}, 3]', "item 2: a number, not an object"),
        ("[]", "holds no examples"),
    ],
)
def test_json_errors(
    tmp_path: Path, model_dir: Callable[..., Path], text: str, message: str
) -> None:
    source = tmp_path / "d.json"
    source.write_text(text)
    assert message in refusal(source, model_dir())


def test_names_the_missing_tokenizer(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", {"input_ids": [1, 2]}, {"text": "a"})
    got = refusal(source, tmp_path)
    assert "no tokenizer there" in got
    assert f"{source}, line 2 needs one" in got
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    assert "the tokenizer cannot be loaded" in refusal(source, tmp_path / "m")


def test_tokenizer_of_another_model(tmp_path: Path, model_dir: Callable[..., Path]) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", {"text": "zzz"})
    assert "outside the model's vocabulary of 40; use the tokenizer that belongs" in refusal(
        source, model_dir(), vocab_size=40
    )


def test_template_errors(tmp_path: Path, model_dir: Callable[..., Path]) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", {"messages": TURNS})
    got = refusal(source, model_dir(template=REFUSING))
    assert f"{source}, line 1: the model's chat template refuses the messages: roles must" in got
    got = refusal(source, model_dir(template=COUNTING))
    assert "does not show where the assistant's turn begins" in got


def test_rejects_data_when_no_example_is_left(
    tmp_path: Path, model_dir: Callable[..., Path]
) -> None:
    row = {"prompt": "a long question", "completion": "no"}
    source = write_jsonl(tmp_path / "d.jsonl", row, row)
    got = refusal(source, model_dir())
    assert "no example is left to train on (2 dropped: the first 8 tokens held no answer)" in got
    assert "raise --seq" in got
    source = write_jsonl(tmp_path / "d.jsonl", {"messages": TURNS[:2]})
    assert "no example is left" in refusal(source, model_dir(template=CHATML_TEMPLATE))


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", {"input_ids": [1, 2]})
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with pytest.raises(DataError, match=r"while tokenising .*check space and permissions"):
        prepare(source, model_dir=tmp_path, cache_dir=in_the_way / "data", seq=8)


# ---------------------------------------------------------------- order and batches


def tokenized(folder: Path, lengths: list[int], *, seq: int = 64, seed: int = 0) -> Dataset:
    """Return a dataset whose example i consists of tokens i + 1."""
    source = write_jsonl(
        folder / "d.jsonl", *({"input_ids": [i + 1] * n} for i, n in enumerate(lengths))
    )
    return prepare(source, model_dir=folder, cache_dir=folder / "c", seq=seq, seed=seed)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 40), batch=st.integers(1, 70), seed=st.integers(0, 2**63))
def test_epochs_follow_without_gap_or_repeat(
    tmp_path_factory: pytest.TempPathFactory, count: int, batch: int, seed: int
) -> None:
    dataset = tokenized(tmp_path_factory.mktemp("d"), [2] * count, seed=seed)
    steps = -(-3 * count // batch)
    stream = np.concatenate([dataset.indices(step, batch) for step in range(steps)])
    one_by_one = np.concatenate([dataset.indices(i, 1) for i in range(3 * count)])
    assert np.array_equal(stream[: 3 * count], one_by_one)
    for epoch in range(3):
        part = stream[epoch * count : (epoch + 1) * count]
        assert sorted(part) == list(range(count))


def test_order_is_a_function_of_seed_and_step_alone(tmp_path: Path) -> None:
    first = tokenized(tmp_path, [2] * 50, seed=1)
    again = open_dataset(first.folder, seed=1)
    other = open_dataset(first.folder, seed=2)
    assert again is not None
    assert other is not None
    for step in (30, 0, 7):
        for key, value in first.batch_arrays(step, 4).items():
            assert np.array_equal(value, again.batch_arrays(step, 4)[key])
    assert list(first.indices(0, 50)) != list(other.indices(0, 50))
    assert list(first.indices(0, 50)) != list(first.indices(1, 50))


def test_order_is_the_same_in_every_version(tmp_path: Path) -> None:
    """Resuming a run needs these exact numbers; changing them breaks runs that exist."""
    dataset = tokenized(tmp_path, [2] * 8, seed=5)
    first, second = [7, 4, 3, 5, 6, 2, 0, 1], [7, 6, 1, 5, 4, 2, 0, 3]
    assert list(dataset.indices(0, 16)) == first + second


def test_padding_to_a_multiple_of_eight_with_a_mask(tmp_path: Path) -> None:
    dataset = tokenized(tmp_path, [3, 11, 5])
    batch = dataset.batch_arrays(0, 3)
    assert {key: value.dtype for key, value in batch.items()} == dict.fromkeys(batch, np.int64)
    assert batch["input_ids"].shape == (3, 16)
    for row, index in enumerate(dataset.indices(0, 3)):
        length = [3, 11, 5][index]
        token = index + 1
        assert list(batch["input_ids"][row]) == [token] * length + [0] * (16 - length)
        assert list(batch["labels"][row]) == [token] * length + [IGNORE] * (16 - length)
        assert list(batch["attention_mask"][row]) == [1] * length + [0] * (16 - length)


def test_padding_stops_at_seq(tmp_path: Path) -> None:
    batch = tokenized(tmp_path, [3, 20], seq=13).batch_arrays(0, 2)
    assert batch["input_ids"].shape == (2, 13)


def test_equal_lengths_need_no_mask(tmp_path: Path) -> None:
    batch = tokenized(tmp_path, [5, 5, 5]).batch_arrays(0, 3)
    assert sorted(batch) == ["input_ids", "labels"]
    assert batch["input_ids"].shape == (3, 5)


def test_batch_gives_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dataset = tokenized(tmp_path, [3, 5])
    batch = dataset.batch(0, 2)
    assert all(value.dtype == torch.int64 for value in batch.values())
    for key, value in dataset.batch_arrays(0, 2).items():
        assert np.array_equal(batch[key].numpy(), value)


@pytest.mark.parametrize(
    ("epochs", "batch", "steps"),
    [(1, 4, 3), (1.0, 10, 1), (2, 4, 5), (0.5, 5, 1), (0.01, 4, 1), (3, 1, 30), (1, 64, 1)],
)
def test_steps_for_epochs(tmp_path: Path, epochs: float, batch: int, steps: int) -> None:
    assert tokenized(tmp_path, [2] * 10).steps_for(epochs, batch) == steps


def test_pad_token_of_the_tokenizer(tmp_path: Path, model_dir: Callable[..., Path]) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", {"text": "ab"})
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir())
    prepared = prepare(source, model_dir=model_dir(), cache_dir=tmp_path / "c", seq=8)
    assert prepared.pad_id == tokenizer.pad_token_id
    encoder = Encoder(model_dir())
    encoder.tokenizer("test")
    assert encoder.pad_id(tokenizer.pad_token_id) == tokenizer.eos_token_id
    assert encoder.pad_id(3) == 0


# ---------------------------------------------------------------- the cache


def test_cache_is_reused_and_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tokenized(tmp_path, [2, 3])
    stamp = (first.folder / "tokens.bin").stat().st_ino

    def again(seq: int = 64) -> Dataset:
        return prepare(
            tmp_path / "d.jsonl", model_dir=tmp_path, cache_dir=first.folder, seq=seq, seed=0
        )

    assert again() == first
    assert (first.folder / "tokens.bin").stat().st_ino == stamp
    assert again(seq=32).fingerprint != first.fingerprint
    write_jsonl(tmp_path / "d.jsonl", {"input_ids": [9, 9]})
    changed = again()
    assert len(changed) == 1
    assert list(changed.example(0)[0]) == [9, 9]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert again().fingerprint != changed.fingerprint
    assert sorted(p.name for p in first.folder.iterdir()) == [
        "labels.bin",
        "meta.json",
        "offsets.npy",
        "tokens.bin",
    ]


def test_refused_file_leaves_the_old_cache(tmp_path: Path) -> None:
    first = tokenized(tmp_path, [2, 3])
    (tmp_path / "d.jsonl").write_text('{"input_ids": [1, 2]}\nnot json\n')
    with pytest.raises(DataError, match="line 2"):
        prepare(tmp_path / "d.jsonl", model_dir=tmp_path, cache_dir=first.folder, seq=64)
    assert open_dataset(first.folder, seed=0) == first
    assert not list(first.folder.glob("*.part"))


@pytest.mark.parametrize("name", ["tokens.bin", "labels.bin", "offsets.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_damaged_cache_is_not_opened_but_rebuilt(tmp_path: Path, name: str, damage: str) -> None:
    first = tokenized(tmp_path, [2, 3])
    path = first.folder / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3])
    assert open_dataset(first.folder, seed=0) is None
    assert tokenized(tmp_path, [2, 3]) == first
    assert list(first.example(1)[0]) == [2, 2, 2]


def test_file_cut_short_under_an_open_dataset(tmp_path: Path) -> None:
    dataset = tokenized(tmp_path, [2, 3])
    path = dataset.folder / "labels.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"labels\.bin: 12 bytes wanted at offset 8, 8 there"):
        dataset.example(1)


def test_open_dataset_returns_none_without_a_cache(tmp_path: Path) -> None:
    assert open_dataset(tmp_path / "none", seed=0) is None


def test_large_file_streams(tmp_path: Path) -> None:
    line = json.dumps({"input_ids": list(range(1000, 1200))}) + "\n"
    source = tmp_path / "d.jsonl"
    source.write_text(line * 3000)
    tracemalloc.start()
    prepared = prepare(source, model_dir=tmp_path, cache_dir=tmp_path / "c", seq=256)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(prepared) == 3000
    assert source.stat().st_size > 3_000_000
    assert peak < 1_000_000


@settings(max_examples=50, deadline=None)
@given(rows=rows, seq=st.integers(2, 12))
def test_rows_survive_tokenising_and_truncation(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[tuple[int, bool]]], seq: int
) -> None:
    folder = tmp_path_factory.mktemp("d")
    made_of = [([t for t, _ in row], [t if on else IGNORE for t, on in row]) for row in rows]
    kept = [
        (ids[:seq], labels[:seq])
        for ids, labels in made_of
        if any(label != IGNORE for label in labels[1:seq])
    ]
    source = write_jsonl(
        folder / "d.jsonl", *({"input_ids": ids, "labels": labels} for ids, labels in made_of)
    )
    if not kept:
        with pytest.raises(DataError, match="no example is left"):
            prepare(source, model_dir=folder, cache_dir=folder / "c", seq=seq, vocab_size=1000)
        return
    prepared = prepare(source, model_dir=folder, cache_dir=folder / "c", seq=seq, vocab_size=1000)
    assert len(prepared) == len(kept)
    assert prepared.summary.dropped == len(rows) - len(kept)
    for index, (ids, labels) in enumerate(kept):
        got_ids, got_labels = (list(part) for part in prepared.example(index))
        assert got_ids == ids[: len(got_ids)]
        assert got_labels == labels[: len(got_labels)]
        assert all(label == IGNORE for label in labels[len(got_labels) :])
    trained = sum(label != IGNORE for _, labels in kept for label in labels[1:])
    assert prepared.summary.trained_tokens == trained


# ---------------------------------------------------------------- the example set


def test_example_set_of_the_project() -> None:
    folder = Path(__file__).parents[2] / "examples" / "data"
    lines = (folder / "captains_log.jsonl").read_text(encoding="ascii").splitlines()
    rows = [json.loads(line) for line in lines]
    requested = {row["instruction"] for row in rows}
    assert 200 <= len(rows) == len(requested) == len({row["output"] for row in rows})
    assert all(list(row) == ["instruction", "output"] for row in rows)
    assert all(row["output"].startswith("Captain's log: ") for row in rows)
    assert all(row["output"].endswith(" Fair winds!") for row in rows)
    held_out = (folder / "prompts.txt").read_text(encoding="ascii").splitlines()
    assert 3 <= len(held_out) <= 5
    assert requested.isdisjoint(held_out)
