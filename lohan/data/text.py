"""Text and chats to tokens and labels, with the model folder's own tokenizer."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

from lohan.data.dataset import IGNORE, Example
from lohan.errors import DataError

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
