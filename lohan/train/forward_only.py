"""Forward-only use of a model with streamed weights.

This covers evaluation, generation, and the tasks of lm-evaluation-harness.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.capture.fake import CPU
from lohan.capture.footprint import measure
from lohan.checkpoint.hf_folder import causal_config
from lohan.checkpoint.resharding import StoreSet, open_set
from lohan.checkpoint.store_io import (
    check_same,
    create_weights_store,
    restore_buffers,
    store_reader,
    to_meta,
)
from lohan.checkpoint.store_io import source_of as source_of_model
from lohan.data import IGNORE, Encoder
from lohan.device.choose import open_device
from lohan.engine.attach import device_overhead, load, make_executor
from lohan.engine.context import PlanContext
from lohan.engine.policies import Budget
from lohan.engine.session import Session
from lohan.engine.workload import blocks_of
from lohan.errors import BudgetError, ConfigError, DataError, StoreError, first_line
from lohan.model.layout import Blocks
from lohan.model.plan import Plan, PlanOptions
from lohan.model.state import STATE_FORMATS, stored_model
from lohan.optim import AdamW, Lora
from lohan.param_groups import ParamGroups
from lohan.planner.memory import WORK
from lohan.planner.planner import forward_plan
from lohan.store.admin import remove
from lohan.store.files import StoreLock, is_locked
from lohan.store.store import Store
from lohan.train.language import check_packs
from lohan.train.run_folder import RunFolder, stores_of
from lohan.train.task import Batch, Examples, Stats, Task, mean_stats
from lohan.util.display import Display
from lohan.util.files import checked, parse_json
from lohan.util.settings import PROMPT_SUFFIXES
from lohan.util.trace import Trace
from lohan.util.units import align_up

# -- Models that run forward only, with weights streamed from a store ------------------------------
#
# A run has its own store. For a Hugging Face folder, a temporary store with only the weights is
# created and removed afterwards.


LOGIT_COPIES = 4  # the logits, their fp32 copy and intermediate results
HEAD_TOKENS = (16, 256)  # smallest and largest number of tokens in a slice of the head
HEAD_SHARE = 4  # A slice may take this fraction (1 / HEAD_SHARE) of the budget.
CHUNK_PARAMS = 2**22
NO_UPDATES = ParamGroups([AdamW(lr=0.0)], {})


@dataclass(frozen=True)
class Source:
    """The model to run: a Hugging Face folder and, for a run made from it, the run's stores."""

    folder: Path
    stores: StoreSet | None = None
    lora: Lora | None = None
    base: str = ""  # how the frozen weights are packed
    template: str | None = None  # chat template, if it is not the folder's own


@dataclass(frozen=True)
class Shape:
    """The largest batch to plan for.

    `cache_tokens` is the final length of its rows if keys and values are cached, otherwise 0.
    """

    batch: int
    tokens: int
    cache_tokens: int = 0
    packed: bool = False


def source_of(folder: Path) -> Source:
    """Return the source for a run folder or a model folder."""
    run = RunFolder(folder.absolute())
    if run.config_file.is_file():
        config = run.config()
        return Source(
            config.model,
            stores_of(run, config),
            config.train.adapter,
            config.train.base or "",
            config.train.chat_template,
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder}: neither a run (run.toml) nor a model folder (config.json); give the folder "
            "that `lohan train --out` wrote, or one with config.json and weights"
        )
    return Source(folder.absolute())


@contextmanager
def open_stream(
    source: Source,
    shape: Shape,
    budget: Budget,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Session]:
    """Open the model in evaluation mode, with its memory planned for `shape` within the budget.

    The weights of a model folder, or of a run with several ranks, are copied to `budget.ssd`.
    """
    with ExitStack() as undo:
        opened = open_device(device, memory=budget.device_bytes())
        room = opened.memory_bytes() if opened.has_own_memory else None
        stores: tuple[Store, ...] = ()
        if source.stores is not None:
            stores = undo.enter_context(open_set(source.stores))
            held = stored_model(stores[0].meta, stores[0].regions)
            dtype = held.state_format.name
        dtype = dtype or own_dtype(source.folder)
        model = load(source.folder, dtype=dtype, lora=source.lora).eval()
        if shape.packed:
            check_packs(model)
        blocks = blocks_of(model, batch_of(shape), base=source.base, dtype=dtype)
        if stores:
            check_same(stores[0], blocks, dtype)
            if len(stores) > 1:  # The copy of several stores contains dequantised weights.
                blocks = blocks_of(model, batch_of(shape))
            restore_buffers(model, stores[0].meta)
        host = budget.host_bytes()
        chunk = held.chunk_params if stores else CHUNK_PARAMS
        plan = _plan(
            model,
            blocks,
            shape,
            dtype,
            host=host,
            device=room,
            chunk_params=chunk,
            torch_device=opened.torch_device,
            overhead=device_overhead(opened, model, host),
        )
        if len(stores) == 1:
            store = stores[0]
        else:
            # Use the user's folders, or else those next to the run's stores.
            folders = (
                [path.parent for path in source.stores.dirs[0]] if source.stores else [Path.cwd()]
            )
            dirs = [undo.enter_context(_temporary(ssd)) for ssd in budget.ssd or folders]
            created = create_weights_store(
                store_reader(*stores) if stores else source_of_model(model),
                blocks,
                dtype,
                chunk_params=plan.chunk_params,
                dirs=dirs,
                progress=progress,
            )
            undo.callback(remove, dirs)
            store = undo.enter_context(created)
        to_meta(model)
        context = PlanContext(blocks, PlanOptions(dtype=dtype), None, host, None, opened, room)
        run = partial(make_executor, model, context, store, NO_UPDATES, Trace())
        yield undo.enter_context(Session(model, context, run, plan))


def _plan(
    model: nn.Module,
    blocks: Blocks,
    shape: Shape,
    dtype: str,
    *,
    host: int,
    device: int | None,
    chunk_params: int,
    torch_device: torch.device,
    overhead: Iterable[tuple[str, int]],
) -> Plan:
    """Return a plan with the largest micro-batch that fits.

    A batch that fills a cache cannot be divided.
    """
    micro_batch, (least, most) = shape.batch, HEAD_TOKENS
    each = LOGIT_COPIES * 4 * model.config.get_text_config().vocab_size  # type: ignore[operator, union-attr]
    room = (host if device is None else device) // HEAD_SHARE
    head = max(least, min(most, shape.batch * shape.tokens, room // each))
    while True:
        try:
            return forward_plan(
                blocks,
                dtype,
                host_bytes=host,
                device_bytes=device,
                micro_batch=micro_batch,
                head_tokens=head,
                chunk_params=chunk_params,
                needs=needs_of(
                    model,
                    blocks,
                    shape,
                    dtype,
                    micro_batch=micro_batch,
                    head=head,
                    torch_device=torch_device,
                )
                | dict(overhead),
            )
        except BudgetError:
            if micro_batch == 1 or shape.cache_tokens:
                raise
            micro_batch = -(-micro_batch // 2)


WEIGHTS_PREFIX = "lohan-weights-"
WEIGHTS_LOCK = ".lohan-weights"  # lock file in such a folder, held by the process that created it


@contextmanager
def _temporary(ssd: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a folder for a copy of the weights in `ssd`, and remove it at the end.

    The system's folder for temporary files may be in memory, so it is not used. A process that is
    killed leaves its folder; the next one that copies weights there removes it.
    """
    _remove_abandoned(Path(ssd))
    try:
        folder = tempfile.TemporaryDirectory(prefix=WEIGHTS_PREFIX, dir=ssd)
    except OSError as error:
        raise StoreError(
            f"{ssd}: no folder can be made there ({error.strerror}); give another place as --ssd"
        ) from None
    with folder as path, StoreLock([Path(path)], name=WEIGHTS_LOCK):
        yield Path(path) / "store"


def _remove_abandoned(ssd: Path) -> None:
    """Remove folders of `_temporary` whose process has ended."""
    for folder in ssd.glob(f"{WEIGHTS_PREFIX}*"):
        made_here = (folder / WEIGHTS_LOCK).is_file() and not folder.is_symlink()
        if made_here and not is_locked(folder, name=WEIGHTS_LOCK):
            shutil.rmtree(folder, ignore_errors=True)


def own_dtype(folder: Path) -> str:
    """Return the name of the type of the folder's weights, or "fp32" if it is not supported."""
    named = str(getattr(causal_config(folder), "dtype", None) or "float32").removeprefix("torch.")
    return next((name for name, fmt in STATE_FORMATS.items() if fmt.dtype == named), "fp32")


def batch_of(shape: Shape) -> dict[str, torch.Tensor]:
    """Return the largest batch on the meta device."""
    ids = torch.empty((shape.batch, shape.tokens), dtype=torch.long, device="meta")
    return {"input_ids": ids} | ({"position_ids": ids} if shape.packed else {})


def needs_of(
    model: nn.Module,
    blocks: Blocks,
    shape: Shape,
    dtype: str,
    *,
    micro_batch: int,
    head: int,
    torch_device: torch.device = CPU,
) -> dict[str, int]:
    """Return the bytes needed in addition to the weights, by owner.

    The head processes `head` tokens at a time or, in generation, the last token of each row.
    """
    config: Any = model.config
    text, width = config.get_text_config(), STATE_FORMATS[dtype].weight_bytes
    measured = measure(
        model,
        blocks,
        batch_of(shape),
        micro_batch=micro_batch,
        torch_device=torch_device,
        training=False,
    )
    last: Any = model.get_output_embeddings()  # type: ignore[operator]
    sites = {model.get_submodule(site.name): site.name for site in blocks.sites}
    measured.sites.pop(sites.get(last, ""), None)  # the head never gets all tokens at once
    rows = shape.batch if shape.cache_tokens else head
    logits = rows * text.vocab_size * 4 * LOGIT_COPIES
    stream = shape.batch * shape.tokens * text.hidden_size * width
    work = max(measured.peak_bytes, logits)
    needs = {"hidden state": 2 * stream, WORK: work}
    if shape.cache_tokens:
        needs["keys and values"] = cache_bytes(text, width, shape.batch, shape.cache_tokens)
    return needs


def cache_bytes(text: Any, width: int, batch: int, tokens: int) -> int:
    """Return the bytes of keys and values of all layers.

    One layer is counted twice, because its old and new cache coexist while it grows.
    """
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    each = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int((text.num_hidden_layers + 1) * 2 * heads * each * batch * tokens * width)


# -- Evaluation: the loss on held-out data, with weights streamed as in training -------------------
#
# Evaluation does not affect training: it restores the random state, counts no step and writes
# nothing.


LARGEST_EXPONENT = 700.0  # larger losses would overflow the perplexity


@dataclass(frozen=True)
class Evaluation:
    """The mean loss over all tokens, or over all examples, that have a loss."""

    loss: float
    tokens: int
    seconds: float
    perplexing: bool = True  # whether a perplexity is meaningful for this loss
    stats: Mapping[str, float] = field(default_factory=dict)  # means of the task's other statistics

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, LARGEST_EXPONENT))

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f}"
        extra = "".join(f", {name.replace('_', ' ')} {x:.3g}" for name, x in self.stats.items())
        return (f"{text}, perplexity {self.perplexity:.4g}" if self.perplexing else text) + extra

    def to_row(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "eval_loss": self.loss,
            **({"eval_perplexity": self.perplexity} if self.perplexing else {}),
            "eval_tokens": self.tokens,
            "eval_s": self.seconds,
            **{f"eval_{name}": value for name, value in self.stats.items()},
        }


def evaluate(
    model: nn.Module,
    dataset: Examples,
    *,
    batch: int,
    task: Task[Any],
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
    loss_of: Callable[[Batch], float] | None = None,
) -> Evaluation | None:
    """Evaluate every row of the dataset once, or return None if `stop` interrupts.

    `loss_of` computes the loss of a batch if it is not just the model's own, as with several ranks.
    """
    loss_function = loss_of or (lambda inputs: task.loss(model, inputs).item())
    start, total, tokens = time.perf_counter(), 0.0, 0
    passes, results = -(-len(dataset) // batch), list[tuple[Stats, int]]()
    progress(0, passes)
    with forward_only(model):
        for number, inputs in enumerate(dataset.passes(batch)):
            if stop():
                return None
            count = task.weight(model, inputs)
            total += loss_function(inputs) * count
            tokens += count
            results.append((inputs.get("stats", {}), task.rows(inputs)))
            progress(number + 1, passes)
    stats = {name: mean for name, (mean, _) in mean_stats(results).items()}
    return Evaluation(total / tokens, tokens, time.perf_counter() - start, task.PERPLEXITY, stats)


@contextmanager
def forward_only(model: nn.Module) -> Iterator[None]:
    """Disable gradients, use evaluation mode, and restore the random state at the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        torch_device = compute_device(model)
        forked = [] if torch_device.type == "cpu" else [torch_device.index or 0]
        with torch.no_grad(), torch.random.fork_rng(devices=forked, device_type=torch_device.type):
            yield
    finally:
        for module in training:
            module.training = True


def compute_device(model: nn.Module) -> torch.device:
    """Return the device that the model computes on."""
    devices = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(devices, torch.device("cpu"))


@dataclass(frozen=True)
class History:
    """The evaluations of a run so far, read from its log."""

    steps: frozenset[int] = frozenset()
    best: float = math.inf
    best_step: int = 0
    since_best: int = 0  # number of evaluations after the best one

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> History:
        history = cls()
        for row in rows:
            history = history.with_row(row)
        return history

    def improves(self, loss: float) -> bool:
        return loss < self.best

    def with_row(self, row: Mapping[str, Any]) -> History:
        steps, loss = self.steps | {row["step"]}, row["eval_loss"]
        if self.improves(loss):
            return History(steps, loss, row["step"], 0)
        return History(steps, self.best, self.best_step, self.since_best + 1)


# -- Generation ------------------------------------------------------------------------------------
#
# The prompt is processed in one pass. After that, every new token needs one pass over the weights.
# Several prompts are answered together, so that each pass gives one token to each of them. Keys and
# values are cached. The generation loop is that of transformers.


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the most likely one."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def read_prompts(entries: Sequence[str]) -> list[str]:
    """Return the prompts; an entry that names a file stands for the prompts in it.

    A text file has one prompt per line. In JSON files, a prompt is a string or the `prompt` or
    `text` of an object.
    """
    prompts: list[str] = []
    for entry in entries:
        if entry.endswith(PROMPT_SUFFIXES) and "\n" not in entry and Path(entry).is_file():
            prompts += _prompts_of(Path(entry))
        else:
            prompts.append(entry)
    return prompts


def _prompts_of(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".txt":
            prompts = [line for line in text.splitlines() if line.strip()]
        elif file.suffix == ".jsonl":
            prompts = [_prompt_of(parse_json(line)) for line in text.splitlines() if line.strip()]
        else:
            rows: list[Any] = checked(parse_json(text), list[Any], "")
            prompts = [_prompt_of(row) for row in rows]
    except ValueError as error:
        raise DataError(
            f"{file}: not a file of prompts ({error}); write one per line, or objects with prompt"
        ) from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}; check the path") from None
    if not prompts:
        raise DataError(f"{file}: holds no prompt; write one per line")
    return prompts


def _prompt_of(row: Any) -> str:
    value = row.get("prompt", row.get("text")) if isinstance(row, dict) else row
    if not isinstance(value, str):
        raise ValueError("no prompt in an object")
    return value


def encode_prompts(encoder: Encoder, prompts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each prompt, after the chat template if the model has one."""
    encoded = [encoder.prompt(text, place="generation") for text in prompts]
    if empty := [text for text, ids in zip(prompts, encoded, strict=True) if not ids]:
        raise DataError(f"prompt {empty[0]!r} has no token; write a longer one")
    return encoded


def generate(
    model: nn.Module,
    encoder: Encoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    streamer: Any = None,
) -> list[str]:
    """Return the text that follows each prompt.

    Short prompts are padded on the left, and the padding is masked.
    """
    tokenizer = encoder.tokenizer("generation")
    causal: Any = model
    longest = max(map(len, prompts))
    pad = encoder.pad_id(None)
    torch_device = compute_device(model)
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=torch_device)
    real = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    mask = torch.tensor(real, device=torch_device)
    with forward_only(model):
        torch.manual_seed(sampling.seed)
        out = causal.generate(
            input_ids=ids,
            attention_mask=mask,
            use_cache=True,
            streamer=streamer,
            pad_token_id=pad,
            max_new_tokens=sampling.max_new_tokens,
            **_choice(sampling),
        )
    return [tokenizer.decode(row[longest:], skip_special_tokens=True) for row in out]


def _choice(sampling: Sampling) -> dict[str, Any]:
    if sampling.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
    }


# -- Tasks of lm-evaluation-harness ----------------------------------------------------------------


ANSWER = 256  # tokens of an answer if a task does not specify it
# log-probability of a continuation, and whether it is the most likely one
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
    """Return the results of each task by metric, as the harness reports them."""
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
    """Scores and answers of a model whose weights are read once for each batch or token.

    `seq` counts all tokens of a row. The harness counts them without the last.
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
        """Return the scores of continuations after their contexts.

        Rows that are too long are truncated at the beginning.
        """
        scores: list[Scored] = [(0.0, True)] * len(pairs)
        rows = [
            ((context + then)[-self.seq :], min(len(then), self.seq - 1)) for context, then in pairs
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

    def answers(self, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """Return the text that follows each prompt, up to its first stop string."""
        answers = [""] * len(asked)
        groups: dict[tuple[int, float, float], list[int]] = {}
        for index, (_, how) in enumerate(asked):
            sampled = bool(how.get("do_sample", float(how.get("temperature", 0)) > 0))
            warmth = float(how.get("temperature", 1.0)) if sampled else 0.0
            count = int(how.get("max_gen_toks", how.get("max_new_tokens", ANSWER)))
            groups.setdefault((count, warmth, float(how.get("top_p", 1.0))), []).append(index)
        for (count, warmth, top_p), indices in groups.items():
            room = self.seq - 1 - count
            if room < 1:
                raise ConfigError(f"--seq {self.seq}: a task wants answers of {count}; raise it")
            ids = {p: self.encode(asked[p][0])[-room:] for p in indices}
            order = sorted(indices, key=lambda index: -len(ids[index]))
            longest = len(ids[order[0]])
            shape = Shape(min(self.batch, len(order)), longest, longest + count)
            sampling = Sampling(max_new_tokens=count, temperature=warmth, top_p=top_p)
            with self._opened(shape) as session:
                for start in range(0, len(order), self.batch):
                    some = order[start : start + self.batch]
                    texts = generate(session.model, self.encoder, [ids[p] for p in some], sampling)
                    for index, text in zip(some, texts, strict=True):
                        answers[index] = _cut_at_stops(text, asked[index][1].get("until"))
                    self._shown.advance("answering", start + len(some), len(order))
        return answers

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Tokenise a text without adding a second start token."""
        start = self.tokenizer.bos_token
        if special is None and start and text.startswith(start):
            special = False
        how = {} if special is None else {"add_special_tokens": special}
        ids: list[int] = self.tokenizer.encode(text, **how)
        return ids


def _label_logps(
    session: Session, inputs: dict[str, torch.Tensor], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of the labelled tokens, and whether each is the most likely.

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
    """Return the model behind the interface of the harness."""
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
            return streamed.scores([(context, then) for _, context, then in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            """Return log-likelihoods of whole texts, in windows that do not overlap."""
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
