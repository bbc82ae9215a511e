"""Text, prompts and chats as tokens and labels, with the model folder's own tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lohan.data.dataset import IGNORE, Example
from lohan.errors import DataError, first_line
from lohan.util.files import BadJson, json_type, parse_json
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
        from lohan.checkpoint.sources import MARK

        if (model_dir / MARK).is_file():
            raise DataError(
                f"--init has no tokenizer, and {needed_by} needs one; give a folder that has one "
                "with --tokenizer DIR, or tokenized input_ids"
            )
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
        raise DataError(
            f"{model_dir}: the tokenizer cannot be loaded: {first_line(error)}; "
            "copy the original model's tokenizer files again"
        ) from None


# Common formats of chats by the names they are known by; a model's own template comes first.
CHAT_TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama-3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>"
        "\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "alpaca": (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}\n\n"
        "{% elif m['role'] == 'user' %}### Instruction:\n{{ m['content'] }}\n\n"
        "{% else %}### Response:\n{{ m['content'] }}{{ eos_token }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
}


def chat_template(name: str) -> str:
    """The template that a name or a file stands for."""
    if name in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[name]
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(
            f"--chat-template {name}: neither one of {', '.join(CHAT_TEMPLATES)} nor a file that "
            f"can be read ({reason}); give one of them, or a .jinja file"
        ) from None


def chosen_template(name: str | None) -> str | None:
    """As `chat_template`, where one was asked for."""
    return None if name is None else chat_template(name)


class Encoder:
    """Text and chats to tokens and labels. The tokenizer is loaded when first needed."""

    def __init__(
        self, model_dir: Path, *, template: str | None = None, tokenizer: Any = None
    ) -> None:
        self.model_dir, self.template, self._given = model_dir, template, tokenizer
        self.skipped_turns = self.unseen_tools = 0
        self._tokenizer: Any = None
        self._tools: list[Any] | None = None  # of the conversation that is rendered
        self._bos: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        """Another process loads the tokenizer itself."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_closing"}
        return {**kept, "_tokenizer": None}

    def counts(self) -> tuple[int, ...]:
        return self.skipped_turns, self.unseen_tools

    def count(self, more: Sequence[int]) -> None:
        self.skipped_turns += more[0]
        self.unseen_tools += more[1]

    def tokenizer(self, place: str) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._given or load_tokenizer(self.model_dir, needed_by=place)
            if self.template is not None:
                self._tokenizer.chat_template = chat_template(self.template)
            first = self._tokenizer("a", add_special_tokens=True)["input_ids"][:1]
            self._bos = first if first == [self._tokenizer.bos_token_id] else []
        return self._tokenizer

    def ids(self, text: str, *, place: str) -> list[int]:
        """Tokens of the text and nothing else."""
        check_characters(text, "a text", place=place)
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

    def show(self, prompt: list[int], answer: list[int]) -> dict[str, str]:
        """Tokens as text for people, and where their form comes from; empty if the data brought
        tokens of its own."""
        if self._tokenizer is None:
            return {}
        text = self._tokenizer.decode(prompt)
        used = "none" if not self._tokenizer.chat_template else self.template or "the model's own"
        return {
            "template": used, "system": self.system_of(text), "prompt": text,
            "answer": self._tokenizer.decode(answer),
        }  # fmt: skip

    def system_of(self, prompt: str) -> str:
        """What a rendered conversation tells the model before its first question, and who says so:
        the data, or the template by itself."""
        self._tools = None
        asked, told = {"role": "user", "content": "{{ask}}"}, "{{system}}"
        try:
            plain = self._render([asked]).partition("{{ask}}")[0]
            given = self._render([{"role": "system", "content": told}, asked])
        except DataError:  # no system prompt in this template, or no template
            return "none"
        before, found, after = given.partition("{{ask}}")[0].partition(told)
        if not found or not after:
            return "none"

        def within(text: str) -> str:
            end = text.find(after, len(before)) if text.startswith(before) else -1
            return text[len(before) : end].strip() if end > 0 else ""

        if not (system := within(prompt)):
            return "none"
        return f"{system!r}, {'of the template' if system == within(plain) else 'of the data'}"

    def answer(
        self, prompt: str, answer: str, *, raw: bool, place: str, system: str = ""
    ) -> Example:
        """A prompt and its answer: through the chat template if there is one, else plain.

        The plain parts are tokenised apart, as they are when the model is asked.
        """
        if self.tokenizer(place).chat_template:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            first = [{"role": "system", "content": system}] if system else []
            return self.chat(first + turns, place=place)
        text = prompt if raw else PLAIN_PROMPT.format(prompt)
        text = f"{system}\n\n{text}" if system else text
        before = self.bos(place=place) + self.ids(text, place=place)
        after = self.ids(answer, place=place) + self.eos()
        return before + after, [IGNORE] * len(before) + after

    def asked(self, messages: list[dict[str, Any]], *, place: str) -> list[int]:
        """A conversation up to where the assistant is to go on."""
        return self.ids(self._render(messages, place=place, prompt=True), place=place)

    def prompt(self, text: str, *, place: str) -> list[int]:
        """A prompt without its answer, as the model is asked."""
        if self.tokenizer(place).chat_template:
            messages, self._tools = [{"role": "user", "content": text}], None
            return self.asked(messages, place=place)
        return self.bos(place=place) + self.ids(text, place=place)

    def chat(
        self, messages: list[dict[str, Any]], *, place: str, tools: list[Any] | None = None
    ) -> Example:
        """A conversation with loss on what the assistant says, its closing token included; not on
        turns of weight 0.

        A turn that the template renders otherwise once more turns follow (some leave out earlier
        reasoning) cannot be found in the text: it carries no loss and is counted.
        """
        template = self.tokenizer(place).chat_template
        if not template:
            raise DataError(
                f"{place}: messages need a chat template and {self.model_dir} has none; "
                f"give --chat-template ({', '.join(CHAT_TEMPLATES)} or a file), or use "
                "prompt+completion"
            )
        self._tools = tools
        self.unseen_tools += bool(tools) and not re.search(r"\btools\b", str(template))
        said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        turns = [i for i in said if messages[i].get("weight") != 0]
        if turns == said and re.search(r"\{%-?\s*generation\b", str(template)):
            return self._tagged_chat(messages, place=place)
        text = self._render(messages, place=place)
        spans = [span for turn in turns if (span := self._turn_span(messages, turn, text))]
        self.skipped_turns += len(turns) - len(spans)
        if turns and not spans:
            raise DataError(
                f"{place}: the model's chat template does not show where the assistant's turn "
                "begins; mark it with {% generation %} in the template, or use tokenized "
                "input_ids with labels"
            )
        return self._mask_spans(text, spans, place=place)

    def rendered(self, messages: list[dict[str, Any]], *, place: str) -> str:
        """The text of a conversation."""
        self.tokenizer(place)
        return self._render(messages, place=place)

    def _tagged_chat(self, messages: list[dict[str, Any]], *, place: str) -> Example:
        try:
            out = self._tokenizer.apply_chat_template(
                messages, tools=self._tools, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True,
            )  # fmt: skip
        except Exception as error:  # a template raises what it likes
            raise self._refused(error, place=place) from None
        ids, mask = out["input_ids"], out["assistant_masks"]
        return ids, [token if on else IGNORE for token, on in zip(ids, mask, strict=True)]

    def _render(
        self, messages: list[dict[str, Any]], *, place: str = "", prompt: bool = False
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=self._tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template raises what it likes
            raise self._refused(error, place=place) from None
        return text

    def _refused(self, error: Exception, *, place: str) -> DataError:
        return DataError(
            f"{place}: the model's chat template refuses the messages: {first_line(error)}; "
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
KINDS = (
    ("input_ids",), ("messages",), ("conversations",),
    ("prompt", "completion"), ("prompt", "response"),
    ("instruction", "output"), ("instruction", "response"),
    ("question", "answer"), ("question", "response"),
    ("text",),
)  # fmt: skip
Prompt = str | list[dict[str, Any]]  # text, or messages


def encode_row(row: dict[str, Any], *, encoder: Encoder, place: str) -> Example:
    """Tokens and labels of one object; the first of KINDS whose keys it has decides."""
    row = {key: value for key, value in row.items() if value is not None}
    keys = next((keys for keys in KINDS if all(key in row for key in keys)), None)
    if keys is None:
        found = ", ".join(row) or "none"
        known = "; ".join("+".join(keys) for keys in KINDS)
        pairs = {"chosen", "rejected"} <= row.keys()
        hint = "; for pairs of answers add --task preference" if pairs else ""
        begun = next((keys for keys in KINDS if any(key in row for key in keys)), None)
        if begun is not None and not pairs:
            missing = " and ".join(key for key in begun if key not in row)
            raise DataError(f"{place}: {missing} is missing (found: {found}); known are {known}")
        raise DataError(f"{place}: no known keys (found: {found}); known are {known}{hint}")
    if keys[0] == "prompt" and isinstance(row.get("label"), bool):
        raise DataError(
            f"{place}: a completion with label {str(row['label']).lower()} is rated, and would be "
            "learnt either way; add --task preference --loss kto, or leave label out"
        )
    if keys == ("input_ids",):
        return _tokenized(row, place=place)
    if keys == ("text",):
        text = _text(row, "text", place=place)
        ids = encoder.bos(place=place) + encoder.ids(text, place=place) + encoder.eos()
        return ids, ids
    prompt = prompt_of(row, keys[0], place=place)
    if len(keys) == 1:
        assert isinstance(prompt, list)
        messages = _told(system_in(row, place=place), prompt)
        return encoder.chat(messages, place=place, tools=tools_in(row, place=place))
    given = row[keys[1]]
    answer = _messages(given, place=place) if isinstance(given, list) else None
    return encode_answer(
        prompt, answer or _text(row, keys[1], place=place), row, raw=keys[0] == "prompt",
        encoder=encoder, place=place,
    )  # fmt: skip


def prompt_of(row: dict[str, Any], key: str, *, place: str) -> Prompt:
    """What a row of this kind asks: text, or messages where it has some, or turns before it."""
    if key == "conversations":
        turns = share_gpt(_from_json_text(row[key], key, place=place), place=place)
        return _messages(turns, place=place)
    if key == "messages":
        return _messages(_from_json_text(row[key], key, place=place), place=place)
    if isinstance(row[key], list):
        return _messages(row[key], place=place)
    text = _text(row, key, place=place)
    extra = next((k for k in ("input", "context") if key == "instruction" and row.get(k)), None)
    if extra is not None:
        text = f"{text}\n\n{_text(row, extra, place=place)}"
    before = _history(row, place=place) if key == "instruction" else []
    return [*before, {"role": "user", "content": text}] if before else text


def encode_answer(
    prompt: Prompt, answer: Prompt, row: dict[str, Any], *, raw: bool, encoder: Encoder, place: str
) -> Example:
    """Tokens of both, with labels on the answer alone. System prompt and tools are the row's."""
    system, tools = system_in(row, place=place), tools_in(row, place=place)
    if isinstance(prompt, str) and isinstance(answer, str) and not tools:
        return encoder.answer(prompt, answer, raw=raw, place=place, system=system)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    before = _told(system, before)
    ids, labels = encoder.chat([*before, *after], place=place, tools=tools)
    asked = len(encoder.asked(before, place=place))
    return ids, [IGNORE] * asked + labels[asked:]


def _told(system: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Behind the system prompt of the row, if they have none of their own."""
    if not system or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def system_in(row: dict[str, Any], *, place: str) -> str:
    for key in ("system", "system_prompt"):
        if isinstance(row.get(key), str):
            return _text(row, key, place=place)
    return ""


def _history(row: dict[str, Any], *, place: str) -> list[dict[str, Any]]:
    """Earlier questions with their answers, as messages."""
    pairs = _from_json_text(row.get("history") or [], "history", place=place)
    if not isinstance(pairs, list) or any(
        not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in pairs
    ):
        raise DataError(f"{place}: history must be a list of pairs, each a question and its answer")
    turns = [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return _messages(turns, place=place) if turns else []


_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"), "system": "system",
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
}  # fmt: skip


def share_gpt(value: Any, *, place: str) -> Any:
    """Turns of `from` and `value` as messages; those that are messages already stay so."""
    if not isinstance(value, list):
        raise DataError(f"{place}: conversations must be a list of turns, got {kind_of(value)}")
    messages = []
    for number, turn in enumerate(value, 1):
        if isinstance(turn, dict) and "role" in turn:
            messages.append(turn)
            continue
        if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
            raise DataError(f"{place}: turn {number} must be an object with from and value")
        role = _SPEAKERS.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            raise DataError(
                f"{place}: turn {number} is from {turn['from']!r}; known are {', '.join(_SPEAKERS)}"
            )
        messages.append({"role": role, "content": turn["value"]})
    return messages


def tools_in(row: dict[str, Any], *, place: str) -> list[Any] | None:
    """What a template may show the model as tools: a list, or the text of one."""
    tools = _from_json_text(row.get("tools") or None, "tools", place=place)
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{place}: tools must be a list of objects, got {kind_of(tools)}")
    return tools or None


def _from_json_text(value: Any, key: str, *, place: str) -> Any:
    """Tables without lists hold them as JSON."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return parse_json(value)
    except BadJson as error:
        raise DataError(f"{place}: {key} is not a list in JSON: {error}; correct it") from None


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
    check_characters(value, key, place=place)
    return value


def check_characters(text: str, what: str, *, place: str) -> None:
    """Refuses what no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{place}: {what} holds half of a \\ud83d\\ude00-like pair; repair or remove it"
        ) from None


def _messages(value: Any, *, place: str) -> list[dict[str, Any]]:
    """Checked, with contents in parts as one text."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: messages must be a list of objects, got {kind_of(value)}")
    found = []
    for number, message in enumerate(value, 1):
        where = f"{place}: message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where} must be an object with role and content")
        content = message.get("content")
        if isinstance(content, list) and content:
            message = {**message, "content": _joined(content, where=where)}
        elif content is not None or not message.get("tool_calls"):
            _text({"content": content}, "content", place=where)
        found.append(message)
    return found


def _joined(parts: list[Any], *, where: str) -> str:
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            raise DataError(
                f"{where}: its content has a part that is no text ({kind}); give text, or train a "
                "model that takes images with --task vision-language"
            )
    return _text({"content": "".join(p["text"] for p in parts)}, "content", place=where)


def kind_of(value: Any) -> str:
    if isinstance(value, list) and not value:
        return "an empty list"
    return json_type(value, other="a value of type ")  # tables have more
