"""Tasks of lm-evaluation-harness with streamed weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lohan.checkpoint.hf_folder import causal_config
from lohan.data import IGNORE, Encoder
from lohan.engine.policies import Budget
from lohan.engine.session import Session
from lohan.errors import ConfigError, first_line
from lohan.train.evaluation import compute_device, forward_only
from lohan.train.generation import Sampling, generate
from lohan.train.streaming import Shape, Source, open_stream, source_of
from lohan.util.display import Display
from lohan.util.units import align_up

ANSWER = 256  # limit on the tokens of an answer if a task does not specify one
# The log-probability of a continuation, and whether greedy decoding would produce it.
Scored = tuple[float, bool]


def run_tasks(
    model_or_run: Path,
    tasks: Sequence[str],
    *,
    budget: Budget,
    device: str,
    dtype: str | None,
    batch: int,
    seq: int,
    limit: int | None,
    fewshot: int | None,
    folder: Path | None,
    shown: Display,
) -> dict[str, Any]:
    """Return the results of each task by metric, as the harness reports them.

    `limit` is the number of examples per task, `fewshot` the number of examples in a prompt, and
    `folder` a folder with further tasks. If `limit` or `fewshot` is None, the harness decides.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"--tasks: lm-evaluation-harness cannot be imported ({first_line(error)}); pip install "
            "'lohan[eval]'"
        ) from None
    source = source_of(model_or_run)
    causal_config(source.folder)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--tasks-dir {folder}: no such folder; check the name")
    manager = TaskManager(include_path=None if folder is None else str(folder))
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            f"--tasks: the harness has no task {unknown[0]!r}; `lm_eval ls tasks` lists them, "
            "--tasks-dir names a folder with your own"
        )

    @contextlib.contextmanager
    def opened(shape: Shape) -> Iterator[Session]:
        with open_stream(
            source,
            shape,
            budget,
            device=device,
            dtype=dtype,
            progress=lambda done, total: shown.advance("loading", done, total),
        ) as session:
            yield session

    streamed = Streamed(source, opened, batch=batch, seq=seq, shown=shown)
    try:
        evaluated = lm_eval.simple_evaluate(
            model=_as_lm(streamed),
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            num_fewshot=fewshot,
            log_samples=False,
            bootstrap_iters=0,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--tasks: the harness cannot run {', '.join(tasks)}: {first_line(error)}; data of its "
            "tasks comes from the hub or from files that they name"
        ) from error
    results: dict[str, Any] = {}
    for task, row in evaluated["results"].items():
        results[task] = {
            key.removesuffix(",none"): value
            for key, value in row.items()
            if isinstance(value, float) and "stderr" not in key
        }
    return results


class Streamed:
    """A model with streamed weights that scores continuations and answers prompts.

    Scoring reads the weights once per batch; answering reads them once per token. `seq` counts all
    tokens of a row. The harness does not count the last token.
    """

    def __init__(
        self,
        source: Source,
        opened: Callable[[Shape], contextlib.AbstractContextManager[Session]],
        *,
        batch: int,
        seq: int,
        shown: Display,
    ) -> None:
        self.encoder = Encoder(source.folder, template=source.template)
        self.tokenizer: Any = self.encoder.tokenizer("--tasks")
        self.batch, self.seq = batch, seq
        self._opened, self._shown = opened, shown

    def scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """Return the score of each continuation, given its context.

        Rows that are too long are truncated at the beginning.
        """
        scores: list[Scored] = [(0.0, True)] * len(pairs)
        rows = [
            ((context + continuation)[-self.seq :], min(len(continuation), self.seq - 1))
            for context, continuation in pairs
        ]
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
        longest = max(len(ids) for ids, _ in rows)
        shape = Shape(min(self.batch, len(rows)), min(self.seq, align_up(longest, 8)))
        with self._opened(shape) as session, forward_only(session.model):
            for start in range(0, len(order), self.batch):
                some = order[start : start + self.batch]
                for index, score in zip(
                    some, self._scored(session, [rows[p] for p in some]), strict=True
                ):
                    scores[index] = score
                self._shown.advance("scoring", min(start + self.batch, len(order)), len(order))
        return scores

    def _scored(self, session: Session, rows: list[tuple[list[int], int]]) -> list[Scored]:
        width = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), width), self.encoder.pad_id(None))
        labels, mask = torch.full_like(ids, IGNORE), torch.zeros_like(ids)
        for number, (tokens, count) in enumerate(rows):
            ids[number, : len(tokens)] = torch.tensor(tokens)
            mask[number, : len(tokens)] = 1
            labels[number, len(tokens) - count : len(tokens)] = torch.tensor(tokens[-count:])
        torch_device = compute_device(session.model)
        inputs = {"input_ids": ids.to(torch_device), "attention_mask": mask.to(torch_device)}
        logps, likeliest = _label_logps(session, inputs, labels.to(torch_device))
        counts = [count for _, count in rows]
        return [
            (float(row_logps.double().sum()), bool(best.all()))
            for row_logps, best in zip(
                torch.split(logps, counts), torch.split(likeliest, counts), strict=True
            )
        ]

    def answers(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """Return the text that follows each prompt, up to its first stop string."""
        answers = [""] * len(requests)
        groups: dict[tuple[int, float, float], list[int]] = {}
        for index, (_, how) in enumerate(requests):
            sampled = bool(how.get("do_sample", float(how.get("temperature", 0)) > 0))
            warmth = float(how.get("temperature", 1.0)) if sampled else 0.0
            count = int(how.get("max_gen_toks", how.get("max_new_tokens", ANSWER)))
            groups.setdefault((count, warmth, float(how.get("top_p", 1.0))), []).append(index)
        for (count, warmth, top_p), indices in groups.items():
            room = self.seq - 1 - count
            if room < 1:
                raise ConfigError(f"--seq {self.seq}: a task wants answers of {count}; raise it")
            ids = {p: self.encode(requests[p][0])[-room:] for p in indices}
            order = sorted(indices, key=lambda index: -len(ids[index]))
            longest = len(ids[order[0]])
            shape = Shape(min(self.batch, len(order)), longest, longest + count)
            sampling = Sampling(max_new_tokens=count, temperature=warmth, top_p=top_p)
            with self._opened(shape) as session:
                for start in range(0, len(order), self.batch):
                    some = order[start : start + self.batch]
                    texts = generate(session.model, self.encoder, [ids[p] for p in some], sampling)
                    for index, text in zip(some, texts, strict=True):
                        answers[index] = _cut_at_stops(text, requests[index][1].get("until"))
                    self._shown.advance("answering", start + len(some), len(order))
        return answers

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Return the tokens of a text, with special tokens around it if `special` is true.

        By default, the tokenizer decides, except that a text that begins with the BOS token gets no
        other.
        """
        start = self.tokenizer.bos_token
        if special is None and start and text.startswith(start):
            special = False
        how = {} if special is None else {"add_special_tokens": special}
        ids: list[int] = self.tokenizer.encode(text, **how)
        return ids


def _label_logps(
    session: Session, inputs: dict[str, torch.Tensor], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each labelled token, and whether it is the most likely token.

    Tokens are in row order. If the session has a sliced head, full logits never exist.
    """
    logps, best = list[torch.Tensor](), list[torch.Tensor]()

    def note(logits: torch.Tensor, tokens: torch.Tensor) -> None:
        logps.append(-torch.nn.functional.cross_entropy(logits.float(), tokens, reduction="none"))
        best.append(logits.argmax(-1) == tokens)

    head = session.head
    if head is None:
        logits = session.model(**inputs).logits[:, :-1]
        counted = labels[:, 1:] != IGNORE
        note(logits[counted], labels[:, 1:][counted])
    else:
        head.on_logits = note
        try:
            session.model(**inputs, labels=labels)
        finally:
            head.on_logits = None
    return torch.cat(logps), torch.cat(best)


def _cut_at_stops(text: str, stops: str | list[str] | None) -> str:
    for stop in [stops] if isinstance(stops, str) else stops or []:
        text = text.split(stop)[0] if stop else text
    return text


def _as_lm(streamed: Streamed) -> Any:
    """Wrap `streamed` as a model of the harness (a `TemplateLM`)."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

    class Model(TemplateLM):  # type: ignore[misc]
        tokenizer = streamed.tokenizer

        @property
        def eot_token_id(self) -> int:
            return int(self.tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            start = self.tokenizer.bos_token_id
            return self.eot_token_id if start is None else int(start)

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            return streamed.encode(string, add_special_tokens)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[Scored]:
            return streamed.scores(
                [(context, continuation) for _, context, continuation in requests]
            )

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            """Return the log-likelihood of each text, summed over windows that do not overlap."""
            windows, owners = [], []
            for owner, request in enumerate(requests):
                every = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=streamed.seq - 1,
                    context_len=1,
                )
                for window in map(utils.make_disjoint_window, every):
                    windows.append(window)
                    owners.append(owner)
            total = [0.0] * len(requests)
            for owner, (logp, _) in zip(owners, streamed.scores(windows), strict=True):
                total[owner] += logp
            return total

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return streamed.answers([request.args for request in requests])

    return Model()
