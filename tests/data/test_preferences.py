"""Rows of preferences as tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lohan.data import Encoder
from lohan.data.supervised import encode_preference
from lohan.errors import DataError
from tests.support.model_folders import (
    model_dir_fixture,  # noqa: F401 - a fixture
    spelled_tokens,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "q"}


def assistant_turn(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ASKED = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [USER], "chosen": [assistant_turn("a")], "rejected": [assistant_turn("b")]},
        {"chosen": [USER, assistant_turn("a")], "rejected": [USER, assistant_turn("b")]},
        # The prompt as text and once more in both answers; by other names; one turn for a list.
        {
            "prompt": "q",
            "chosen": [USER, assistant_turn("a")],
            "rejected": [USER, assistant_turn("b")],
        },
        {
            "prompt": [USER],
            "chosen": [USER, assistant_turn("a")],
            "rejected": [USER, assistant_turn("b")],
        },
        {"question": "q", "chosen": "a", "rejected": "b"},
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        {"messages": [USER], "chosen": assistant_turn("a"), "rejected": assistant_turn("b")},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
    ],
)
def test_forms_of_a_pair(model_dir: Callable[..., Path], row: dict[str, Any]) -> None:
    encoder = Encoder(model_dir(template=CHATML))
    examples, rating = encode_preference(row, encoder=encoder, place="x")
    assert rating is None
    for example, answer in zip(examples, "ab", strict=True):
        text, shown = spelled_tokens(encoder, *example)
        assert text.startswith(f"{ASKED}{answer}<|im_end|>")
        assert shown.strip("~") == f"{answer}<|im_end|>"


def test_system_prompt_and_tools_of_a_row(model_dir: Callable[..., Path]) -> None:
    encoder = Encoder(model_dir(template="{{ tools[0].name }}" + CHATML))
    row = {"system": "s", "question": "q", "chosen": "a", "rejected": "b", "tools": [{"name": "t"}]}
    (example, _), _ = encode_preference(row, encoder=encoder, place="x")
    begin = "t<|im_start|>system\ns<|im_end|>\n"
    assert spelled_tokens(encoder, *example)[0].startswith(f"{begin}{ASKED}a<|im_end|>")


@pytest.mark.parametrize(("label", "rating"), [(True, True), (0, False), ("True", True), ("0", 0)])
def test_ratings_of_a_table(label: Any, rating: bool, model_dir: Callable[..., Path]) -> None:
    row = {"prompt": "q", "completion": "a", "label": label}
    assert encode_preference(row, encoder=Encoder(model_dir()), place="x")[1] == rating


def test_earlier_turns_of_a_prompt_carry_no_loss(model_dir: Callable[..., Path]) -> None:
    encoder = Encoder(model_dir(template=CHATML))
    row = {
        "prompt": [USER, assistant_turn("z"), USER],
        "completion": [assistant_turn("a")],
        "label": False,
    }
    (example,), rating = encode_preference(row, encoder=encoder, place="x")
    assert rating is False
    assert spelled_tokens(encoder, *example)[1].strip("~") == "a<|im_end|>"


def test_texts_share_whole_words(model_dir: Callable[..., Path]) -> None:
    encoder = Encoder(model_dir())
    row = {"chosen": "is it so? yes", "rejected": "is it so? yesterday"}
    examples, _ = encode_preference(row, encoder=encoder, place="x")
    assert [spelled_tokens(encoder, *one)[1].strip("~") for one in examples] == [
        "yes<|im_end|>",
        "yesterday<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "chosen": "a"}, r"no known keys \(found: prompt, chosen\)"),
        ({"prompt": "q", "completion": "a", "label": "good"}, "label must be true or false"),
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "chosen must be text or messages"),
        (
            {"chosen": "a", "rejected": [assistant_turn("b")]},
            "must both be texts, or both messages",
        ),
        ({"chosen": [assistant_turn("a")], "rejected": [assistant_turn("b")]}, "share no question"),
    ],
)
def test_bad_rows_are_named(
    model_dir: Callable[..., Path],
    row: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(DataError, match=f"file, line 3: .*{message}"):
        encode_preference(row, encoder=Encoder(model_dir()), place="file, line 3")
