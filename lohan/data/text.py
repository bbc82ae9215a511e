"""Converting text, prompts and chats to tokens and labels with the model folder's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lohan.data.dataset import IGNORE, Example
from lohan.data.tokenizing import PIECE_CHARACTERS, deadline, pieces, tokenizer_errors
from lohan.errors import DataError, LohanError, first_line
from lohan.util.files import BadJson, json_type, parse_json
from lohan.util.units import counted

# -- Tokenizers and chat templates -----------------------------------------------------------------


PLAIN_PROMPT = "### Question:\n{}\n\n### Answer:\n"
TEMPLATE_DEADLINE_S = 60.0  # for one conversation
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens*", "added_tokens*", "chat_template*"),
    *("vocab*", "merges*", "spiece*", "*.model", "*.tiktoken"),
)


def tokenizer_files(model_dir: Path) -> list[Path]:
    """Return the files of a model folder that make up its tokenizer, sorted by name."""
    files = {p for pattern in TOKENIZER_FILES for p in model_dir.glob(pattern) if p.is_file()}
    return sorted(files)


def load_tokenizer(model_dir: Path, *, needed_by: str) -> Any:
    """Load the model folder's tokenizer without network access.

    `needed_by` names what needs the tokenizer, for messages.
    """
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
    except Exception as error:  # Tokenizer loaders may raise any exception.
        raise DataError(
            f"{model_dir}: the tokenizer cannot be loaded: {first_line(error)}; "
            "copy the original model's tokenizer files again"
        ) from None


# Common chat formats by name. They are used only if the user chooses one.
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
    """Return the template of a given name, or the content of a template file."""
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
    """Return `chat_template(name)`, or None if no template was requested."""
    return None if name is None else chat_template(name)


class Encoder:
    """A converter of text and chats to tokens and labels, which loads its tokenizer when needed."""

    def __init__(
        self, model_dir: Path, *, template: str | None = None, tokenizer: Any = None
    ) -> None:
        self.model_dir, self.template, self._given_tokenizer = model_dir, template, tokenizer
        self.skipped_turns = self.unseen_tools = 0
        self._tokenizer: Any = None
        self._tools: list[Any] | None = None  # tools of the current conversation
        self._bos: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without the tokenizer, which that process loads."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_closing"}
        return {**kept, "_tokenizer": None}

    def counts(self) -> tuple[int, ...]:
        return self.skipped_turns, self.unseen_tools

    def count(self, more: Sequence[int]) -> None:
        self.skipped_turns += more[0]
        self.unseen_tools += more[1]

    def tokenizer(self, place: str) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._given_tokenizer or load_tokenizer(
                self.model_dir, needed_by=place
            )
            if self.template is not None:
                self._tokenizer.chat_template = chat_template(self.template)
            first = self._tokenizer("a", add_special_tokens=True)["input_ids"][:1]
            self._bos = first if first == [self._tokenizer.bos_token_id] else []
        return self._tokenizer

    def ids(self, text: str, *, place: str) -> list[int]:
        """Return the tokens of the text, without special tokens around it.

        A long text is tokenised piece by piece, because tokenizers take hundreds of bytes for each
        token of a call.
        """
        check_characters(text, "a text", place=place)
        self.tokenizer(place)
        if len(text) <= 2 * PIECE_CHARACTERS:
            return self._piece_ids(text, place=place)
        ids: list[int] = []
        for piece in pieces(text, partial(self._piece_ids, place=place)):
            ids += self._piece_ids(piece, place=place)
        return ids

    def _piece_ids(self, text: str, *, place: str) -> list[int]:
        with tokenizer_errors(place):
            tokens = self._tokenizer(text, add_special_tokens=False, verbose=False)
        ids: list[int] = tokens["input_ids"]
        return ids

    def bos(self, *, place: str) -> list[int]:
        """Return a new list: the BOS token if the tokenizer prepends it, else an empty list."""
        self.tokenizer(place)
        return list(self._bos)

    def eos(self) -> list[int]:
        end = self._tokenizer.eos_token_id
        return [] if end is None else [end]

    def pad_id(self, vocab_size: int | None) -> int:
        """Return the padding token, or another valid token if the tokenizer has none.

        The choice has no effect, because padding is masked.
        """
        tokenizer = self._tokenizer
        for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if tokenizer else ():
            if token is not None and 0 <= token < (vocab_size or 2**31):
                return int(token)
        return 0

    def show(self, prompt: list[int], answer: list[int]) -> dict[str, str]:
        """Return tokens decoded to text, with the chat template and system prompt in use.

        The result is empty if the data was tokenized already.
        """
        if self._tokenizer is None:
            return {}
        text = self._tokenizer.decode(prompt)
        used = "none" if not self._tokenizer.chat_template else self.template or "the model's own"
        return {
            "template": used,
            "system": self.system_of(text),
            "prompt": text,
            "answer": self._tokenizer.decode(answer),
        }

    def system_of(self, prompt: str) -> str:
        """Return text that describes the system prompt of a rendered conversation and its origin.

        The origin is the data or the chat template. Without a system prompt, the text is "none".
        """
        self._tools = None
        question, placeholder = {"role": "user", "content": "{{ask}}"}, "{{system}}"
        try:
            plain = self._render([question]).partition("{{ask}}")[0]
            rendered_system = self._render([{"role": "system", "content": placeholder}, question])
        except DataError:  # There is no template, or it does not accept a system prompt.
            return "none"
        before, separator, after = rendered_system.partition("{{ask}}")[0].partition(placeholder)
        if not separator or not after:
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
        """Return the example of a prompt and its answer, with the chat template if there is one.

        Without a template, prompt and answer are tokenised separately, as they are in generation.
        The prompt is then put into PLAIN_PROMPT, unless it is `raw`.
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

    def prompt_tokens(self, messages: list[dict[str, Any]], *, place: str) -> list[int]:
        """Return the tokens of a conversation up to the point where the assistant continues."""
        return self.ids(self._render(messages, place=place, prompt=True), place=place)

    def prompt(self, text: str, *, place: str) -> list[int]:
        """Return the tokens of a prompt without an answer, in the form used for generation."""
        if self.tokenizer(place).chat_template:
            messages, self._tools = [{"role": "user", "content": text}], None
            return self.prompt_tokens(messages, place=place)
        return self.bos(place=place) + self.ids(text, place=place)

    def chat(
        self, messages: list[dict[str, Any]], *, place: str, tools: list[Any] | None = None
    ) -> Example:
        """Return the example of a conversation, with loss on the assistant's turns.

        The loss includes the token that closes a turn, and excludes turns of weight 0.

        Some templates render a turn differently if more turns follow, for example without its
        reasoning. Such a turn cannot be located in the text. It carries no loss and is counted.
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
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        turns = [i for i in answers if messages[i].get("weight") != 0]
        if turns == answers and re.search(r"\{%-?\s*generation\b", str(template)):
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
        """Return the text of a conversation."""
        self.tokenizer(place)
        return self._render(messages, place=place)

    def _tagged_chat(self, messages: list[dict[str, Any]], *, place: str) -> Example:
        try:
            with tokenizer_errors(place), deadline(TEMPLATE_DEADLINE_S):
                out = self._tokenizer.apply_chat_template(
                    messages,
                    tools=self._tools,
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                )
        except LohanError:
            raise
        except Exception as error:  # Templates may raise any exception.
            raise self._refused(error, place=place) from None
        ids, mask = out["input_ids"], out["assistant_masks"]
        return ids, [token if on else IGNORE for token, on in zip(ids, mask, strict=True)]

    def _render(
        self, messages: list[dict[str, Any]], *, place: str = "", prompt: bool = False
    ) -> str:
        try:
            with deadline(TEMPLATE_DEADLINE_S):
                text: str = self._tokenizer.apply_chat_template(
                    messages, tools=self._tools, tokenize=False, add_generation_prompt=prompt
                )
        except Exception as error:  # Templates may raise any exception.
            raise self._refused(error, place=place) from None
        return text

    def _refused(self, error: Exception, *, place: str) -> DataError:
        if isinstance(error, TimeoutError):
            return DataError(
                f"{place}: the chat template has not ended after {TEMPLATE_DEADLINE_S:g} s; it may "
                "loop without end: give another --chat-template, or shorten the conversation"
            )
        return DataError(
            f"{place}: the model's chat template refuses the messages: {first_line(error)}; "
            "change their roles or order"
        )

    def _turn_span(
        self, messages: list[dict[str, Any]], turn: int, text: str
    ) -> tuple[int, int] | None:
        """Find a turn's position in the text by rendering the messages up to it, or return None."""
        try:
            before = self._render(messages[:turn], prompt=True)
            until = text if turn + 1 == len(messages) else self._render(messages[: turn + 1])
        except DataError:
            return None
        matches = text.startswith(until) and until.startswith(before)
        return (len(before), len(until)) if matches else None

    def _mask_spans(self, text: str, spans: list[tuple[int, int]], *, place: str) -> Example:
        """Return the tokens of the text, with labels on the spans.

        If the tokens of the text up to each border are a prefix of the tokens of the whole text,
        the tokens of the whole text are used. Otherwise, the parts between borders are tokenised
        separately, as in generation.
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
        """Return the tokens with labels in the parts of `ids` that carry loss.

        `counts` contains, for each part, the position of its first token and of the first token
        after it. White space after a closing token carries no loss. If the text ends with an answer
        that has no closing token, the EOS token is appended.
        """
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
        """The tokens that can end a turn: all special tokens."""
        added = self._tokenizer.added_tokens_decoder.items()
        special = {token for token, entry in added if entry.special}
        return frozenset(special | set(self._tokenizer.all_special_ids))


# -- Converting a JSON object to tokens and labels, depending on its keys --------------------------


# The keys that each kind of example needs, most specific first.
KINDS = (
    ("input_ids",),
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("text",),
)
Prompt = str | list[dict[str, Any]]  # text, or messages


def encode_row(row: dict[str, Any], *, encoder: Encoder, place: str) -> Example:
    """Return the tokens and labels of a row, encoded as the first of KINDS whose keys it has."""
    row = {key: value for key, value in row.items() if value is not None}
    keys = next((keys for keys in KINDS if all(key in row for key in keys)), None)
    if keys is None:
        present = ", ".join(row) or "none"
        kinds = "; ".join("+".join(keys) for keys in KINDS)
        pairs = {"chosen", "rejected"} <= row.keys()
        hint = "; for pairs of answers add --task preference" if pairs else ""
        begun = next((keys for keys in KINDS if any(key in row for key in keys)), None)
        if begun is not None and not pairs:
            missing = " and ".join(key for key in begun if key not in row)
            raise DataError(f"{place}: {missing} is missing (found: {present}); known are {kinds}")
        raise DataError(f"{place}: no known keys (found: {present}); known are {kinds}{hint}")
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
        messages = _with_system(system_in(row, place=place), prompt)
        return encoder.chat(messages, place=place, tools=tools_in(row, place=place))
    last_value = row[keys[1]]
    answer = _messages(last_value, place=place) if isinstance(last_value, list) else None
    return encode_answer(
        prompt,
        answer or _text(row, keys[1], place=place),
        row,
        raw=keys[0] == "prompt",
        encoder=encoder,
        place=place,
    )


def prompt_of(row: dict[str, Any], key: str, *, place: str) -> Prompt:
    """Return the prompt of a row as text, or as messages if it consists of or follows messages."""
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
    """Return the tokens of prompt and answer, with labels on the answer only.

    The system prompt and the tools are taken from the row.
    """
    system, tools = system_in(row, place=place), tools_in(row, place=place)
    if isinstance(prompt, str) and isinstance(answer, str) and not tools:
        return encoder.answer(prompt, answer, raw=raw, place=place, system=system)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    before = _with_system(system, before)
    ids, labels = encoder.chat([*before, *after], place=place, tools=tools)
    prompt_length = len(encoder.prompt_tokens(before, place=place))
    return ids, [IGNORE] * prompt_length + labels[prompt_length:]


def _with_system(system: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the row's system prompt before them, unless they have one."""
    if not system or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def system_in(row: dict[str, Any], *, place: str) -> str:
    for key in ("system", "system_prompt"):
        if isinstance(row.get(key), str):
            return _text(row, key, place=place)
    return ""


def _history(row: dict[str, Any], *, place: str) -> list[dict[str, Any]]:
    """Return earlier questions and their answers as messages."""
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
    **dict.fromkeys(("human", "user"), "user"),
    "system": "system",
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
}


def share_gpt(value: Any, *, place: str) -> Any:
    """Convert turns with `from` and `value` to messages; keep turns that are messages already."""
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
    """Return the tools of a row, or None if the row has none.

    They may be given as a list or as JSON text.
    """
    tools = _from_json_text(row.get("tools") or None, "tools", place=place)
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{place}: tools must be a list of objects, got {kind_of(tools)}")
    return tools or None


def _from_json_text(value: Any, key: str, *, place: str) -> Any:
    """Parse a list that is given as JSON text, because some tables cannot hold lists."""
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
    """Raise DataError if a text contains unpaired surrogates, which no tokenizer accepts.

    `what` is the name of the text in the message.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{place}: {what} holds half of a \\ud83d\\ude00-like pair; repair or remove it"
        ) from None


def _messages(value: Any, *, place: str) -> list[dict[str, Any]]:
    """Return the messages in `value` after checking them, each with its content as one text."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: messages must be a list of objects, got {kind_of(value)}")
    messages = []
    for number, message in enumerate(value, 1):
        message_place = f"{place}: message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{message_place} must be an object with role and content")
        content = message.get("content")
        if isinstance(content, list) and content:
            message = {**message, "content": _joined(content, where=message_place)}
        elif content is not None or not message.get("tool_calls"):
            _text({"content": content}, "content", place=message_place)
        messages.append(message)
    return messages


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
    return json_type(value, other="a value of type ")  # Tables have types that JSON lacks.


# -- The first example, as text -------------------------------------------------------------------


SHOWN = 1000  # number of characters shown of a prompt's end and of an answer's beginning
HEADS = {"template": "chat template", "system": "system prompt", "images": "images"}


def rendered(shown: Mapping[str, str], *, most: int = SHOWN) -> list[str]:
    """Return lines of text that show the first example, its template and its system prompt."""
    if not shown:
        return []
    prompt, answer = shown["prompt"], shown["answer"]
    prompt = prompt if len(prompt) <= most else f"... {prompt[-most:]}"
    parts = [f"{name}: {shown[key]}" for key, name in HEADS.items() if key in shown]
    texts = [f"{prompt}>>>{_beginning(answer, most)}"]
    if "rejected" in shown:
        texts.append(f"rejected: >>>{_beginning(shown['rejected'], most)}")
    lines = [f"first example ({'; '.join([*parts, 'loss on what follows >>>'])}):"]
    return lines + [f"  {line}" for text in texts for line in text.splitlines()]


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."
