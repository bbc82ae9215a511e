"""Text files, tables and chats as examples, tokens and labels."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from lohan.data.dataset import IGNORE, Example
from lohan.errors import DataError
from lohan.util.json_file import BadJson, NotJson, parse_json
from lohan.util.units import counted

# -- Text and chats to tokens and labels, with the model folder's own tokenizer --------------------


PLAIN_PROMPT = "### Question:\n{}\n\n### Answer:\n"
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens*", "added_tokens*", "chat_template*"),
    *("vocab*", "merges*", "spiece*", "*.model", "*.tiktoken"),
)


def tokenizer_files(model_dir: Path) -> list[Path]:
    """The files of a model folder that make up its tokenizer, sorted by name."""
    found = {p for pattern in TOKENIZER_FILES for p in model_dir.glob(pattern) if p.is_file()}
    return sorted(found)


def load_tokenizer(model_dir: Path, *, needed_by: str) -> Any:
    """The model folder's tokenizer; nothing is fetched from a network."""
    if not tokenizer_files(model_dir):
        raise DataError(
            f"{model_dir}: no tokenizer there (tokenizer.json), and {needed_by} needs one; "
            "copy the original model's tokenizer files into it, or give tokenized input_ids"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # its readers raise whatever they meet
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(
            f"{model_dir}: the tokenizer cannot be loaded: {reason}; "
            "copy the original model's tokenizer files again"
        ) from None


class Encoder:
    """Text and chats to tokens and labels. The tokenizer is loaded when first needed."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.skipped_turns = 0
        self._tokenizer: Any = None
        self._bos: list[int] = []

    def tokenizer(self, place: str) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.model_dir, needed_by=place)
            first = self._tokenizer("a", add_special_tokens=True)["input_ids"][:1]
            self._bos = first if first == [self._tokenizer.bos_token_id] else []
        return self._tokenizer

    def ids(self, text: str, *, place: str) -> list[int]:
        """Tokens of the text and nothing else."""
        tokenizer = self.tokenizer(place)
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def bos(self, *, place: str) -> list[int]:
        """The start token in a new list, if this tokenizer puts one in front of a text."""
        self.tokenizer(place)
        return list(self._bos)

    def eos(self) -> list[int]:
        end = self._tokenizer.eos_token_id
        return [] if end is None else [end]

    def pad_id(self, vocab_size: int | None) -> int:
        """The padding token; any will do, it is masked, but it must be in the vocabulary."""
        tokenizer = self._tokenizer
        for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if tokenizer else ():
            if token is not None and 0 <= token < (vocab_size or 2**31):
                return int(token)
        return 0

    def answer(self, prompt: str, answer: str, *, raw: bool, place: str) -> Example:
        """A prompt and its answer: through the chat template if there is one, else plain.

        The plain parts are tokenised apart, as they are when the model is asked.
        """
        if self.tokenizer(place).chat_template:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            return self.chat(turns, place=place)
        text = prompt if raw else PLAIN_PROMPT.format(prompt)
        before = self.bos(place=place) + self.ids(text, place=place)
        after = self.ids(answer, place=place) + self.eos()
        return before + after, [IGNORE] * len(before) + after

    def prompt(self, text: str, *, place: str) -> list[int]:
        """A prompt without its answer, as the model is asked."""
        if self.tokenizer(place).chat_template:
            messages = [{"role": "user", "content": text}]
            return self.ids(self._render(messages, place=place, prompt=True), place=place)
        return self.bos(place=place) + self.ids(text, place=place)

    def chat(self, messages: list[dict[str, Any]], *, place: str) -> Example:
        """A conversation with loss on what the assistant says, its closing token included.

        A turn that the template renders otherwise once more turns follow (some leave out earlier
        reasoning) cannot be found in the text: it carries no loss and is counted.
        """
        template = self.tokenizer(place).chat_template
        if not template:
            raise DataError(
                f"{place}: messages need a chat template and {self.model_dir} has none; "
                "add chat_template.jinja, or use prompt+completion"
            )
        if re.search(r"\{%-?\s*generation\b", str(template)):
            return self._tagged_chat(messages, place=place)
        text = self._render(messages, place=place)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [span for turn in turns if (span := self._turn_span(messages, turn, text))]
        self.skipped_turns += len(turns) - len(spans)
        if turns and not spans:
            raise DataError(
                f"{place}: the model's chat template does not show where the assistant's turn "
                "begins; mark it with {% generation %} in the template, or use tokenized "
                "input_ids with labels"
            )
        return self._mask_spans(text, spans, place=place)

    def _tagged_chat(self, messages: list[dict[str, Any]], *, place: str) -> Example:
        try:
            out = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:  # a template raises what it likes
            raise self._refused(error, place=place) from None
        ids, mask = out["input_ids"], out["assistant_masks"]
        return ids, [token if on else IGNORE for token, on in zip(ids, mask, strict=True)]

    def _render(
        self, messages: list[dict[str, Any]], *, place: str = "", prompt: bool = False
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template raises what it likes
            raise self._refused(error, place=place) from None
        return text

    def _refused(self, error: Exception, *, place: str) -> DataError:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        return DataError(
            f"{place}: the model's chat template refuses the messages: {reason}; "
            "change their roles or order"
        )

    def _turn_span(
        self, messages: list[dict[str, Any]], turn: int, text: str
    ) -> tuple[int, int] | None:
        """Where a turn stands in the rendered text, from what rendering up to it gives."""
        try:
            before = self._render(messages[:turn], prompt=True)
            until = text if turn + 1 == len(messages) else self._render(messages[: turn + 1])
        except DataError:
            return None
        found = text.startswith(until) and until.startswith(before)
        return (len(before), len(until)) if found else None

    def _mask_spans(self, text: str, spans: list[tuple[int, int]], *, place: str) -> Example:
        """Tokens of the text with labels on the spans.

        If the tokens of every part up to a border begin the tokens of the whole, the whole is
        used; else the parts between borders are tokenised apart, as in generation.
        """
        borders = [place_ for span in spans for place_ in span]
        ids = self.ids(text, place=place)
        counts = []
        for border in borders:
            head = self.ids(text[:border], place=place) if border < len(text) else ids
            if ids[: len(head)] != head:
                break
            counts.append(len(head))
        else:
            return self._label(ids, counts)
        ids, counts = [], []
        for begin, end in zip([0, *borders], [*borders, len(text)], strict=True):
            ids = ids + self.ids(text[begin:end], place=place)
            counts.append(len(ids))
        return self._label(ids, counts[:-1])

    def _label(self, ids: list[int], counts: list[int]) -> Example:
        """Labels between the borders; white space after a closing token carries no loss, and an
        answer at the very end that nothing closes gets the end token."""
        labels = [IGNORE] * len(ids)
        for begin, end in zip(counts[::2], counts[1::2], strict=True):
            last = end
            while last > begin and not self._tokenizer.decode(ids[last - 1 : last]).strip():
                last -= 1
            closed = last > begin and ids[last - 1] in self._closing
            labels[begin : last if closed else end] = ids[begin : last if closed else end]
            if not closed and end == len(ids) and end > begin:
                return ids + self.eos(), labels + self.eos()
        return ids, labels

    @cached_property
    def _closing(self) -> frozenset[int]:
        """Tokens that can end a turn: every special one."""
        added = self._tokenizer.added_tokens_decoder.items()
        special = {token for token, entry in added if entry.special}
        return frozenset(special | set(self._tokenizer.all_special_ids))


# -- One JSON object to tokens and labels: which keys it has decides how ---------------------------


# What an example may be made of: the keys it needs, most specific first.
KINDS = {
    "input_ids": ("input_ids",),
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "question": ("question", "answer"),
    "text": ("text",),
}


def encode_row(row: dict[str, Any], *, encoder: Encoder, place: str) -> Example:
    """Tokens and labels of one object; the first of KINDS whose keys it has decides."""
    row = {key: value for key, value in row.items() if value is not None}
    kind = next((k for k, keys in KINDS.items() if all(key in row for key in keys)), None)
    if kind is None:
        found = ", ".join(row) or "none"
        known = "; ".join("+".join(keys) for keys in KINDS.values())
        raise DataError(f"{place}: no known keys (found: {found}); known are {known}")
    if kind == "input_ids":
        return _tokenized(row, place=place)
    if kind == "messages":
        return encoder.chat(_messages(row["messages"], place=place), place=place)
    if kind == "text":
        text = _text(row, "text", place=place)
        ids = encoder.bos(place=place) + encoder.ids(text, place=place) + encoder.eos()
        return ids, ids
    prompt, answer = (_text(row, key, place=place) for key in KINDS[kind])
    extra = _text(row, "input", place=place) if kind == "instruction" and "input" in row else ""
    if extra:
        prompt = f"{prompt}\n\n{extra}"
    return encoder.answer(prompt, answer, raw=kind == "prompt", place=place)


def _tokenized(row: dict[str, Any], *, place: str) -> Example:
    ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
    for key, values in (("input_ids", ids), ("labels", labels)):
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise DataError(f"{place}: {key} must be a list of whole numbers")
        if any(not -(2**31) <= value < 2**31 for value in values):
            raise DataError(f"{place}: {key} has a number beyond 32 bits; these are not tokens")
    if len(ids) != len(labels):
        raise DataError(
            f"{place}: {len(ids)} input_ids but {counted(len(labels), 'label')}; "
            "give one label per token, -100 where no loss is wanted"
        )
    return ids, labels


def _text(row: dict[str, Any], key: str, *, place: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {key} must be text, got {kind_of(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{place}: {key} holds half of a \\ud83d\\ude00-like pair; repair or remove it"
            ) from None
    return value


def _messages(value: Any, *, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: messages must be a list of objects, got {kind_of(value)}")
    for number, message in enumerate(value, 1):
        where = f"{place}: message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where} must be an object with role and content")
        if message.get("content") is None and "tool_calls" in message:
            continue
        _text({"content": message.get("content")}, "content", place=where)
    return value


def kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, list) and not value:
        return "an empty list"
    kinds = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a value of type {type(value).__name__}")  # tables have more


# -- Tables of the datasets package ----------------------------------------------------------------
#
# A folder that `save_to_disk` wrote, .parquet and .arrow files.
#
# Rows are read one batch at a time and not copied anywhere.


TABLE_SUFFIXES = (".parquet", ".arrow")
ROWS = 256  # at a time
SPLIT = "train"

Progress = Callable[[int, int], None]


def is_table(source: Path) -> bool:
    return source.suffix.lower() in TABLE_SUFFIXES or is_saved(source)


def is_saved(source: Path) -> bool:
    """A folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    return any((source / name).is_file() for name in ("state.json", "dataset_dict.json"))


def files_of(source: Path) -> list[Path]:
    """All that decides the rows."""
    return sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]


def table_rows(source: Path, report: Progress) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, row) of each example. Columns without a value are left out."""
    try:
        total, rows = _open(source)
        for number, row in enumerate(rows, 1):
            yield f"{source}, row {number}", {k: v for k, v in row.items() if v is not None}
            report(number, total)
    except DataError:
        raise
    except Exception as error:  # readers of tables raise what they like: ArrowException, TypeError
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{source}: cannot be read as a table: {first}; write it anew with save_to_disk or "
            "to_parquet"
        ) from None


def _open(source: Path) -> tuple[int, Iterator[dict[str, Any]]]:
    try:
        import datasets
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{source}: tables are read with the package datasets, which is not installed; pip "
            "install datasets, or give a .jsonl file"
        ) from None
    if source.suffix.lower() == ".parquet":
        file = pyarrow.parquet.ParquetFile(source)
        batches = file.iter_batches(batch_size=ROWS)
        return file.metadata.num_rows, (row for batch in batches for row in batch.to_pylist())
    found: Any
    if source.is_dir():
        found = datasets.load_from_disk(str(source))
        if isinstance(found, datasets.DatasetDict):
            found = found[_split(source, list(found))]
    else:
        found = datasets.Dataset.from_file(str(source))
    return len(found), iter(found)


def _split(source: Path, names: list[str]) -> str:
    if SPLIT not in names:
        raise DataError(
            f"{source}: has the splits {', '.join(names)} and no {SPLIT!r}; give the folder of one "
            f"of them, such as {source / names[0]}"
        )
    return SPLIT


# -- A data file as examples, one by one, each with the place it stands at for messages ------------


SUFFIXES = (".txt", ".jsonl", ".json", *TABLE_SUFFIXES)
TEXT_BLOCK_BYTES = 2**18


def read_examples(
    source: Path, *, encoder: Encoder, seq: int, progress: Progress | None
) -> Iterator[tuple[str, Example]]:
    """(where it stands, tokens and labels) of each example, whatever the file's kind."""
    suffix = source.suffix.lower()
    report = progress or (lambda done, total: None)
    if suffix == ".txt":
        for ids in _pieces(_text_blocks(source, report), encoder=encoder, seq=seq, source=source):
            yield str(source), (ids, ids)
        return
    if is_table(source):
        rows = table_rows(source, report)
    else:
        rows = _jsonl_rows(source, report) if suffix == ".jsonl" else _json_rows(source, report)
    empty = True
    for place, row in rows:
        empty = False
        yield place, encode_row(row, encoder=encoder, place=place)
    if empty:
        raise DataError(f"{source}: holds no examples; check --data")


def _text_blocks(source: Path, report: Progress) -> Iterator[str]:
    """The text in blocks that end between two words, so that tokens are those of the whole."""
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8-sig")(), translate=True
    )
    total, done, kept = source.stat().st_size, 0, ""
    with source.open("rb") as file:
        while True:
            raw = file.read(TEXT_BLOCK_BYTES)
            try:
                kept += decoder.decode(raw, final=not raw)
            except UnicodeDecodeError:
                raise DataError(
                    f"{source}: not UTF-8 text after byte {done}; save it as UTF-8"
                ) from None
            done += len(raw)
            report(done, total)
            if not raw:
                break
            end = max((m.start() for m in _BETWEEN_WORDS.finditer(kept)), default=len(kept))
            if kept[:end]:
                yield kept[:end]
            kept = kept[end:]
    if kept:
        yield kept


_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")


def _pieces(
    blocks: Iterator[str], *, encoder: Encoder, seq: int, source: Path
) -> Iterator[list[int]]:
    """One token stream cut into examples of `seq` tokens; the last may be shorter."""
    stream: list[int] | None = None
    for block in blocks:
        if stream is None:
            stream = encoder.bos(place=str(source))
        stream += encoder.ids(block, place=str(source))
        whole = len(stream) // seq * seq
        for begin in range(0, whole, seq):
            yield stream[begin : begin + seq]
        stream = stream[whole:]
    if stream:
        yield stream


def _jsonl_rows(source: Path, report: Progress) -> Iterator[tuple[str, dict[str, Any]]]:
    total, done = source.stat().st_size, 0
    with source.open("rb") as file:
        for number, raw in enumerate(file, 1):
            done += len(raw)
            place = f"{source}, line {number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{place}: not UTF-8 text at byte {error.start}; save it as UTF-8"
                ) from None
            if text.strip():
                yield place, _json_object(text, place=place)
            if number % 64 == 0 or done == total:
                report(done, total)


def _json_object(text: str, *, place: str) -> dict[str, Any]:
    try:
        row = parse_json(text.rstrip())
    except NotJson as error:
        raise DataError(
            f"{place}: not JSON: {error.what} at column {error.column}; "
            "each line must be one JSON object"
        ) from None
    except BadJson as error:
        raise DataError(f"{place}: not usable JSON: {error}; correct or remove it") from None
    return _as_object(row, place=place)


def _as_object(row: Any, *, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(
            f'{place}: {kind_of(row)}, not an object; write {{"text": "..."}} or the like'
        )
    return row


def _json_rows(source: Path, report: Progress) -> Iterator[tuple[str, dict[str, Any]]]:
    """Items of a JSON list. The file is read whole; large sets belong in .jsonl."""
    try:
        rows = parse_json(source.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source}: not UTF-8 text at byte {error.start}; save it as UTF-8"
        ) from None
    except NotJson as error:
        hint = "rename it to .jsonl if each line is an object of its own"
        raise DataError(
            f"{source}, line {error.line}: not JSON: {error.what} at column {error.column}; {hint}"
        ) from None
    except BadJson as error:
        raise DataError(f"{source}: not usable JSON: {error}; correct it") from None
    if not isinstance(rows, list):
        raise DataError(f"{source}: {kind_of(rows)}, not a list; put the objects into [ ... ]")
    total = source.stat().st_size
    for number, row in enumerate(rows, 1):
        place = f"{source}, item {number}"
        yield place, _as_object(row, place=place)
        report(total * number // len(rows), total)
