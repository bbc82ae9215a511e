"""`lohan eval --tasks`: tasks of lm-evaluation-harness, by weights that stream from SSD."""

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
from lohan.train.forward_only import (
    Sampling,
    Shape,
    Source,
    compute_device,
    forward_only,
    generate,
    open_stream,
    source_of,
)
from lohan.util.display import Display
from lohan.util.units import align_up

ANSWER = 256  # tokens of an answer, where a task does not say
Scored = tuple[float, bool]  # log-probability of a continuation, and whether it is the likeliest


def run_tasks(
    place: Path, tasks: Sequence[str], *, budget: Budget, device: str, dtype: str | None,
    batch: int, seq: int, limit: int | None, fewshot: int | None, folder: Path | None,
    shown: Display,
) -> dict[str, Any]:  # fmt: skip
    """Results of each task by metric, as the harness gives them."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"--tasks: lm-evaluation-harness cannot be imported ({first_line(error)}); pip install "
            "'lohan[eval]'"
        ) from None
    source = source_of(place)
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
            source, shape, budget, device=device, dtype=dtype,
            progress=lambda done, total: shown.advance("loading", done, total),
        ) as session:  # fmt: skip
            yield session

    streamed = Streamed(source, opened, batch=batch, seq=seq, shown=shown)
    try:
        found = lm_eval.simple_evaluate(
            model=_as_lm(streamed), tasks=list(tasks), task_manager=manager, limit=limit,
            num_fewshot=fewshot, log_samples=False, bootstrap_iters=0,
        )  # fmt: skip
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--tasks: the harness cannot run {', '.join(tasks)}: {first_line(error)}; data of its "
            "tasks comes from the hub or from files that they name"
        ) from error
    made: dict[str, Any] = {}
    for task, row in found["results"].items():
        made[task] = {
            key.removesuffix(",none"): value
            for key, value in row.items()
            if isinstance(value, float) and "stderr" not in key
        }
    return made


class Streamed:
    """Scores and answers, of a model whose weights are read once for each batch or token. `seq`
    counts all tokens of a row: the harness counts them without the last."""

    def __init__(
        self, source: Source,
        opened: Callable[[Shape], contextlib.AbstractContextManager[Session]], *, batch: int,
        seq: int, shown: Display,
    ) -> None:  # fmt: skip
        self.encoder = Encoder(source.folder, template=source.template)
        self.tokenizer: Any = self.encoder.tokenizer("--tasks")
        self.batch, self.seq = batch, seq
        self._opened, self._shown = opened, shown

    def scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """Of continuations behind their contexts; what is too long loses its beginning."""
        found: list[Scored] = [(0.0, True)] * len(pairs)
        rows = [
            ((context + then)[-self.seq :], min(len(then), self.seq - 1)) for context, then in pairs
        ]
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place][0]))
        longest = max(len(ids) for ids, _ in rows)
        shape = Shape(min(self.batch, len(rows)), min(self.seq, align_up(longest, 8)))
        with self._opened(shape) as session, forward_only(session.model):
            for start in range(0, len(order), self.batch):
                some = order[start : start + self.batch]
                for place, score in zip(
                    some, self._scored(session, [rows[p] for p in some]), strict=True
                ):
                    found[place] = score
                self._shown.advance("scoring", min(start + self.batch, len(order)), len(order))
        return found

    def _scored(self, session: Session, rows: list[tuple[list[int], int]]) -> list[Scored]:
        width = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), width), self.encoder.pad_id(None))
        labels, mask = torch.full_like(ids, IGNORE), torch.zeros_like(ids)
        for number, (tokens, count) in enumerate(rows):
            ids[number, : len(tokens)] = torch.tensor(tokens)
            mask[number, : len(tokens)] = 1
            labels[number, len(tokens) - count : len(tokens)] = torch.tensor(tokens[-count:])
        place = compute_device(session.model)
        inputs = {"input_ids": ids.to(place), "attention_mask": mask.to(place)}
        logps, likeliest = _of_labels(session, inputs, labels.to(place))
        counts = [count for _, count in rows]
        return [
            (float(own.double().sum()), bool(best.all()))
            for own, best in zip(logps.split(counts), likeliest.split(counts), strict=True)
        ]

    def answers(self, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """What follows each text, up to the first of its stops."""
        found = [""] * len(asked)
        groups: dict[tuple[int, float, float], list[int]] = {}
        for place, (_, how) in enumerate(asked):
            sampled = bool(how.get("do_sample", float(how.get("temperature", 0)) > 0))
            warmth = float(how.get("temperature", 1.0)) if sampled else 0.0
            count = int(how.get("max_gen_toks", how.get("max_new_tokens", ANSWER)))
            groups.setdefault((count, warmth, float(how.get("top_p", 1.0))), []).append(place)
        for (count, warmth, top_p), places in groups.items():
            room = self.seq - 1 - count
            if room < 1:
                raise ConfigError(f"--seq {self.seq}: a task wants answers of {count}; raise it")
            ids = {p: self.encode(asked[p][0])[-room:] for p in places}
            order = sorted(places, key=lambda place: -len(ids[place]))
            longest = len(ids[order[0]])
            shape = Shape(min(self.batch, len(order)), longest, longest + count)
            sampling = Sampling(max_new_tokens=count, temperature=warmth, top_p=top_p)
            with self._opened(shape) as session:
                for start in range(0, len(order), self.batch):
                    some = order[start : start + self.batch]
                    texts = generate(session.model, self.encoder, [ids[p] for p in some], sampling)
                    for place, text in zip(some, texts, strict=True):
                        found[place] = _until(text, asked[place][1].get("until"))
                    self._shown.advance("answering", start + len(some), len(order))
        return found

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """As the tokenizer has it, but with one start token at most."""
        start = self.tokenizer.bos_token
        if special is None and start and text.startswith(start):
            special = False
        how = {} if special is None else {"add_special_tokens": special}
        ids: list[int] = self.tokenizer.encode(text, **how)
        return ids


def _of_labels(
    session: Session, inputs: dict[str, torch.Tensor], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the labelled tokens, row after row, and whether each is the likeliest:
    from slices of the head, so that full logits never exist, where the model has such a head."""
    logps, best = list[torch.Tensor](), list[torch.Tensor]()

    def see(logits: torch.Tensor, tokens: torch.Tensor) -> None:
        logps.append(-torch.nn.functional.cross_entropy(logits.float(), tokens, reduction="none"))
        best.append(logits.argmax(-1) == tokens)

    head = session.head
    if head is None:
        logits = session.model(**inputs).logits[:, :-1]
        known = labels[:, 1:] != IGNORE
        see(logits[known], labels[:, 1:][known])
    else:
        head.seen = see
        try:
            session.model(**inputs, labels=labels)
        finally:
            head.seen = None
    return torch.cat(logps), torch.cat(best)


def _until(text: str, stops: str | list[str] | None) -> str:
    for stop in [stops] if isinstance(stops, str) else stops or []:
        text = text.split(stop)[0] if stop else text
    return text


def _as_lm(streamed: Streamed) -> Any:
    """What the harness asks."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

    class Model(TemplateLM):
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
            return streamed.scores([(context, then) for _, context, then in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            """Of whole texts, in windows that do not overlap."""
            windows, owners = [], []
            for owner, request in enumerate(requests):
                every = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
                    max_seq_len=streamed.seq - 1, context_len=1,
                )  # fmt: skip
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
