"""Training data: a file becomes token files once, and any step's batch is a pure function.

    prepare(file) -> RUN/data/{tokens.bin, labels.bin, offsets.npy, meta.json} -> batch(step)

Tokens and labels are flat little-endian int32; example i is [offsets[i], offsets[i + 1]) of both.
Labels follow the Hugging Face convention: as long as the tokens, -100 where no loss is taken, and
the model does the shift; so the first label of an example never counts. `meta.json` is written
last: with the fingerprint of the inputs it marks a complete cache, which a resumed run reuses.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import re
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lohan.errors import DataError
from lohan.units import align_up

FORMAT_VERSION = 1
IGNORE = -100
CACHE_FILES = ("tokens.bin", "labels.bin", "offsets.npy", "meta.json")  # the mark last
SUFFIXES = (".txt", ".jsonl", ".json")
TEXT_BLOCK_BYTES = 2**18
PLAIN_PROMPT = "### Question:\n{}\n\n### Answer:\n"
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens*", "added_tokens*", "chat_template*"),
    *("vocab*", "merges*", "spiece*", "*.model", "*.tiktoken"),
)
# What an example may be made of: the keys it needs, most specific first.
KINDS = {
    "input_ids": ("input_ids",),
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "question": ("question", "answer"),
    "text": ("text",),
}

Progress = Callable[[int, int], None]
Example = tuple[list[int], list[int]]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What came out of the file. Tokens are counted after the cut; trained ones carry loss.

    cut: examples longer than `seq`. dropped: examples with nothing left to train on.
    skipped_turns: assistant turns of chats that had to go without loss, see `Encoder.chat`.
    """

    examples: int
    tokens: int
    trained_tokens: int
    longest: int
    cut: int
    dropped: int
    skipped_turns: int


# ---------------------------------------------------------------- the dataset


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Tokenised examples on disk, in a seeded order; a batch depends on nothing but the step."""

    folder: Path
    seed: int
    seq: int
    pad_id: int
    fingerprint: str
    summary: Summary

    def __len__(self) -> int:
        return self.summary.examples

    @cached_property
    def offsets(self) -> np.ndarray:
        loaded: np.ndarray = np.load(self.folder / "offsets.npy", mmap_mode="r")
        return loaded

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of one example.

        Read, not mapped: touched pages of a map would count as the process's memory, and a file
        cut short would kill the process where a short read is an error.
        """
        begin, end = (int(x) for x in self.offsets[index : index + 2])
        return self._read("tokens.bin", begin, end), self._read("labels.bin", begin, end)

    def _read(self, name: str, begin: int, end: int) -> np.ndarray:
        path = self.folder / name
        try:
            values = np.fromfile(path, dtype="<i4", count=end - begin, offset=4 * begin)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}; {_REBUILD}") from None
        if len(values) != end - begin:
            raise DataError(
                f"{path}: {4 * (end - begin)} bytes wanted at offset {4 * begin}, "
                f"{values.nbytes} there; {_REBUILD}"
            )
        return values

    def indices(self, step: int, batch_size: int) -> np.ndarray:
        """The examples of a step. Epochs follow one another without a gap or a short batch."""
        epochs, places = np.divmod(
            np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64), len(self)
        )
        chosen = np.empty(batch_size, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = _epoch_order(self.seed, int(epoch), len(self))[places[here]]
        return chosen

    def batch_arrays(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """A step's `input_ids` and `labels`, and `attention_mask` if anything is padded.

        Padding is on the right, to the longest example of the batch rounded up to 8 but not past
        `seq`. Examples of one length are left as they are, without a mask.
        """
        rows = [self.example(int(index)) for index in self.indices(step, batch_size)]
        lengths = np.array([len(tokens) for tokens, _ in rows])
        longest = int(lengths.max())
        if (lengths == longest).all():
            return {
                "input_ids": np.stack([tokens for tokens, _ in rows]).astype(np.int64),
                "labels": np.stack([labels for _, labels in rows]).astype(np.int64),
            }
        shape = (batch_size, min(align_up(longest, 8), self.seq))
        input_ids = np.full(shape, self.pad_id, dtype=np.int64)
        labels_out = np.full(shape, IGNORE, dtype=np.int64)
        for row, (tokens, labels) in enumerate(rows):
            input_ids[row, : len(tokens)] = tokens
            labels_out[row, : len(labels)] = labels
        mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
        return {"input_ids": input_ids, "labels": labels_out, "attention_mask": mask}

    def batch(self, step: int, batch_size: int) -> dict[str, Any]:
        """`batch_arrays` as torch tensors: what `model(**batch)` takes."""
        import torch

        return {k: torch.from_numpy(v) for k, v in self.batch_arrays(step, batch_size).items()}

    def steps_for(self, epochs: float, batch_size: int) -> int:
        """Steps that see every example `epochs` times, the last step filled from the next epoch."""
        return max(1, -int(-(len(self) * epochs) // batch_size))


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The permutation of an epoch.

    Sorting raw PCG64 output instead of Generator.permutation: numpy promises the same raw stream
    in every version, and a run may be resumed with another numpy.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    return np.argsort(bits.random_raw(count), kind="stable")


_REBUILD = "remove the folder and start again to build it anew"


def open_dataset(folder: Path, *, seed: int) -> Dataset | None:
    """The complete cache in a folder, or None if there is none; the source is not looked at."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["version"] != FORMAT_VERSION:
            return None
        dataset = Dataset(
            folder=folder,
            seed=seed,
            seq=meta["seq"],
            pad_id=meta["pad_id"],
            fingerprint=meta["fingerprint"],
            summary=Summary(**meta["summary"]),
        )
        flat_bytes = 4 * dataset.summary.tokens
        sizes = [(folder / name).stat().st_size for name in ("tokens.bin", "labels.bin")]
        complete = sizes == [flat_bytes] * 2 and len(dataset.offsets) == len(dataset) + 1
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dataset if complete else None


# ---------------------------------------------------------------- from file to token files


def prepare(
    source: Path,
    *,
    model_dir: Path,
    cache_dir: Path,
    seq: int,
    seed: int = 0,
    vocab_size: int | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Tokenise `source` into `cache_dir`, or reuse what is there if it has the same origin."""
    _check_source(source)
    fingerprint = _fingerprint(source, model_dir=model_dir, seq=seq, vocab_size=vocab_size)
    ready = open_dataset(cache_dir, seed=seed)
    if ready is not None and ready.fingerprint == fingerprint:
        return ready

    made = [folder for folder in (cache_dir, *cache_dir.parents) if not folder.exists()]
    part = {name: cache_dir / f"{name}.part" for name in CACHE_FILES}
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        encoder = Encoder(model_dir)
        examples = _read_examples(source, encoder=encoder, seq=seq, progress=progress)
        counts = _write_examples(examples, part=part, seq=seq, vocab_size=vocab_size)
        if not counts["examples"]:
            raise DataError(
                f"{source}: no example is left to train on ({counts['dropped']} dropped: the first "
                f"{seq} tokens held no answer); raise --seq or check the file"
            )
        meta = {
            "version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "seq": seq,
            "pad_id": encoder.pad_id(vocab_size),
            "summary": asdict(Summary(**counts, skipped_turns=encoder.skipped_turns)),
        }
        part["meta.json"].write_text(json.dumps(meta, indent=1) + "\n")
        _publish(part, cache_dir)
    except BaseException as error:
        _discard(part, made)
        if isinstance(error, OSError):
            raise DataError(
                f"{error.filename or cache_dir}: {error.strerror} while tokenising {source}; "
                "check space and permissions there"
            ) from None
        raise
    dataset = open_dataset(cache_dir, seed=seed)
    if dataset is None:
        raise DataError(f"{cache_dir}: does not hold what was just written there; {_REBUILD}")
    return dataset


def _discard(part: dict[str, Path], made: list[Path]) -> None:
    """Leave nothing behind: unfinished files and the folders made for them, innermost first."""
    for path in part.values():
        with suppress(OSError):
            path.unlink()
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


def _publish(part: dict[str, Path], folder: Path) -> None:
    """Make the new files current: durable first, the old mark away, the new mark last."""
    for path in part.values():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    (folder / "meta.json").unlink(missing_ok=True)
    for name, path in part.items():
        path.replace(folder / name)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_source(source: Path) -> None:
    if not source.exists():
        raise DataError(f"{source}: no such file; check --data")
    if not source.is_file():
        raise DataError(f"{source}: not a file; --data takes one {', '.join(SUFFIXES)} file")
    if source.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"{source}: unknown kind {source.suffix!r}; data is read from {', '.join(SUFFIXES)}"
        )
    if not os.access(source, os.R_OK):
        raise DataError(f"{source}: cannot be read; check its permissions")
    if source.stat().st_size == 0:
        raise DataError(f"{source}: the file is empty; check --data")


def _fingerprint(source: Path, *, model_dir: Path, seq: int, vocab_size: int | None) -> str:
    """A hash of all that decides the token files: contents, not names or times."""
    whole = hashlib.sha256(f"{FORMAT_VERSION} {seq} {vocab_size} {source.suffix}".encode())
    for path in (source, *tokenizer_files(model_dir)):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"\n{'' if path == source else path.name} {digest}".encode())
    return whole.hexdigest()


def _write_examples(
    examples: Iterator[tuple[str, Example]],
    *,
    part: dict[str, Path],
    seq: int,
    vocab_size: int | None,
) -> dict[str, int]:
    """Write the examples that carry loss, and where each begins; give the counts.

    Tokens after the last label are left off: a causal model takes no loss from them.
    """
    offsets = array("q", [0])
    cut = dropped = trained = longest = 0
    with part["tokens.bin"].open("wb") as tokens, part["labels.bin"].open("wb") as labels:
        for place, example in examples:
            ids, targets = (np.asarray(values, dtype=np.int64) for values in example)
            _check_range(ids, targets, vocab_size=vocab_size, place=place)
            carrying = 1 + np.flatnonzero(targets[1:] != IGNORE)
            wanted = int(carrying[-1]) + 1 if len(carrying) else 0
            length = min(wanted, seq)
            count = int(np.count_nonzero(carrying < length))
            cut += wanted > seq
            if count == 0:
                dropped += 1
                continue
            tokens.write(ids[:length].astype("<i4").tobytes())
            labels.write(targets[:length].astype("<i4").tobytes())
            offsets.append(offsets[-1] + length)
            trained += count
            longest = max(longest, length)
    with part["offsets.npy"].open("wb") as file:
        np.save(file, np.asarray(offsets, dtype="<i8"))
    return {
        "examples": len(offsets) - 1,
        "tokens": offsets[-1],
        "trained_tokens": trained,
        "longest": longest,
        "cut": cut,
        "dropped": dropped,
    }


def _check_range(
    ids: np.ndarray, targets: np.ndarray, *, vocab_size: int | None, place: str
) -> None:
    limit = vocab_size if vocab_size is not None else 2**31
    for values in (ids, targets[targets != IGNORE]):
        wrong = values[(values < 0) | (values >= limit)]
        if len(wrong):
            raise DataError(
                f"{place}: token {wrong[0]} is outside the model's vocabulary of {limit}; "
                "use the tokenizer that belongs to the model"
            )


# ---------------------------------------------------------------- reading


def _read_examples(
    source: Path, *, encoder: Encoder, seq: int, progress: Progress | None
) -> Iterator[tuple[str, Example]]:
    """(where it stands, tokens and labels) of each example, whatever the file's kind."""
    suffix = source.suffix.lower()
    report = progress or (lambda done, total: None)
    if suffix == ".txt":
        for ids in _pieces(_text_blocks(source, report), encoder=encoder, seq=seq, source=source):
            yield str(source), (ids, ids)
        return
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
        row = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}: not JSON: {error.msg} at column {error.colno}; "
            "each line must be one JSON object"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not usable JSON: {error}; correct or remove it") from None
    return _as_object(row, place=place)


def _as_object(row: Any, *, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(
            f'{place}: {_kind_of(row)}, not an object; write {{"text": "..."}} or the like'
        )
    return row


def _json_rows(source: Path, report: Progress) -> Iterator[tuple[str, dict[str, Any]]]:
    """Items of a JSON list. The file is read whole; large sets belong in .jsonl."""
    try:
        rows = json.loads(source.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source}: not UTF-8 text at byte {error.start}; save it as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        hint = "rename it to .jsonl if each line is an object of its own"
        raise DataError(
            f"{source}, line {error.lineno}: not JSON: {error.msg} at column {error.colno}; {hint}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source}: not usable JSON: {error}; correct it") from None
    if not isinstance(rows, list):
        raise DataError(f"{source}: {_kind_of(rows)}, not a list; put the objects into [ ... ]")
    total = source.stat().st_size
    for number, row in enumerate(rows, 1):
        place = f"{source}, item {number}"
        yield place, _as_object(row, place=place)
        report(total * number // len(rows), total)


# ---------------------------------------------------------------- from row to tokens and labels


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
        ids = encoder.bos(place=place) + encoder.ids(_text(row, "text", place=place), place=place)
        ids += encoder.eos()
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
            f"{place}: {len(ids)} input_ids but {len(labels)} labels; "
            "give one label per token, -100 where no loss is wanted"
        )
    return ids, labels


def _text(row: dict[str, Any], key: str, *, place: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {key} must be text, got {_kind_of(value)}")
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
        raise DataError(f"{place}: messages must be a list of objects, got {_kind_of(value)}")
    for number, message in enumerate(value, 1):
        where = f"{place}: message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where} must be an object with role and content")
        if message.get("content") is None and "tool_calls" in message:
            continue
        _text({"content": message.get("content")}, "content", place=where)
    return value


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, list) and not value:
        return "an empty list"
    kinds = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds[type(value)]


# ---------------------------------------------------------------- the tokenizer


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
        return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
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
