"""Long rows, tokenizers that panic and chat templates that loop."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lohan.data import Encoder, prepare, text
from lohan.data.tokenizing import PIECE_CHARACTERS, pieces
from lohan.errors import DataError

WORDS = ["apple", "the", "Ärger", "running", "re-read", "42", "a", "naïve", "\n\n", "...", "汉字"]


def trained(folder: Path, pre_tokenizer: object, *, template: str | None = None) -> Encoder:
    core = Tokenizer(models.BPE(unk_token="?"))
    core.pre_tokenizer = pre_tokenizer
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[AddedToken("?")], initial_alphabet=alphabet
    )
    core.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    result = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")
    result.chat_template = template
    result.save_pretrained(folder)
    return Encoder(folder)


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Metaspace(prepend_scheme="always"),
        pre_tokenizers.Metaspace(prepend_scheme="first"),
    ],
    ids=["gpt-2", "prefix space", "llama", "llama, first"],
)
def test_long_text_has_the_tokens_of_the_whole(pre_tokenizer: object, tmp_path: Path) -> None:
    encoder = trained(tmp_path, pre_tokenizer)
    draw = random.Random(3)
    long = " ".join(draw.choices(WORDS, k=40_000))
    tokenizer = encoder.tokenizer("here")
    lengths: list[int] = []

    def tokenize(part: str) -> list[int]:
        lengths.append(len(part))
        actual: list[int] = tokenizer(part, add_special_tokens=False)["input_ids"]
        return actual

    whole = tokenize(long)
    lengths.clear()
    assert [token for part in pieces(long, tokenize) for token in tokenize(part)] == whole
    assert len(long) > 5 * PIECE_CHARACTERS > 2 * max(lengths)
    assert encoder.ids(long, place="here") == whole


def test_text_without_words_is_not_cut(tmp_path: Path) -> None:
    encoder = trained(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    digits = "12" * 2 * PIECE_CHARACTERS
    assert len(encoder.ids(digits, place="here")) == len(digits)


def test_panic_of_tokenizer_names_the_row(tmp_path: Path) -> None:
    """A pattern that backtracks makes the regex engine give up, and the tokenizer panic."""
    slow = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    encoder = trained(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    encoder.tokenizer("here").backend_tokenizer.pre_tokenizer = slow
    with pytest.raises(DataError, match=r"rows, line 3: the tokenizer failed on this text: "):
        encoder.ids("x" * 5_000, place="rows, line 3")


@pytest.mark.parametrize("tagged", [False, True])
def test_looping_template_meets_deadline(
    tagged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "TEMPLATE_DEADLINE_S", 0.2)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    loops += "{% generation %}{% endgeneration %}" if tagged else ""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained(tmp_path / "model", plain, template=loops)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "assistant", "content": "a"}]}))
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(DataError, match=r"line 1: the chat template has not ended after 0\.2 s"):
        prepare(rows, model_dir=tmp_path / "model", cache_dir=tmp_path / "cache", seq=8)
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
