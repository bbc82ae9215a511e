"""Preference tuning: losses on the log-probabilities of chosen and rejected answers.

The reference is never a second model. Its log-probabilities are those of the model before the first
step. They are computed in one forward-only pass over the data and stored with it. A new adapter
does not change the model's outputs, so with LoRA the reference is the base model. Full logits never
exist: the head returns the log-probabilities of tokens and receives the gradient of each.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import logsigmoid

from lohan.capture.blocks import dtype_of
from lohan.checkpoint.adapters import add_lora
from lohan.checkpoint.hf_folder import (
    build_model,
    causal_config,
    draw_head,
    is_causal,
    load_config,
    reward_config,
)
from lohan.config import Config, PreferenceConfig
from lohan.data import IGNORE, Dataset, Encoder
from lohan.data.supervised import Preferences
from lohan.data.text import rendered
from lohan.engine.head import LogpLoss
from lohan.engine.session import Session
from lohan.errors import ConfigError, DataError, ModelError, StorageIOError
from lohan.model.state import STATE_FORMATS
from lohan.store.manifest import checksum
from lohan.train.evaluation import forward_only
from lohan.train.language import CausalLM, remarks, tokenised
from lohan.train.task import Batch, DataRequest, OnProgress, Stats, Task, few_warning
from lohan.util.files import write_atomic
from lohan.util.libraries import offline
from lohan.util.units import align_up, counted

AllReduceSum = Callable[[float], float]  # sums a number over all ranks
WITH_REFERENCE = ("dpo", "ipo", "kto")


class Preference(Task[Preferences]):
    """Preference tuning; rows are pairs of answers, or rated answers."""

    PIPELINE = "text-generation"

    def check(self, config: Config) -> None:
        if config.train.pack:
            raise ConfigError("--pack: pairs of answers are not packed; leave it out")

    def load(self, config: Config, *, dtype: str) -> nn.Module:
        return CausalLM().load(config, dtype=dtype)

    def prepare(self, data: DataRequest) -> Preferences:
        dataset, config = (
            tokenised(data, causal_config(data.config.model), preferences=True),
            data.config,
        )
        rated = config.preference.loss == "kto"
        check_kind(
            dataset, rated=rated, option=data.option, what=f"--loss {config.preference.loss}"
        )
        rows = dataset.summary.examples // (1 if rated else 2)
        return Preferences(dataset, np.arange(rows), config.train.batch, config.preference)

    def describe(self, examples: Preferences, config: Config) -> str:
        summary = examples.sequences.summary
        what = counted(len(examples), "rated answer" if examples.rated else "pair")
        note = f"{what}, {counted(summary.tokens, 'token')}, {summary.trained_tokens:,} in answers"
        if summary.cut:
            answers = counted(summary.examples, "answer")
            note += f"; {summary.cut:,} of {answers} cut to {config.train.seq} tokens"
        lines = [note]
        if summary.dropped:
            lines.append(
                f"warning: {summary.dropped:,} dropped: the first {config.train.seq} tokens hold "
                "no answer; raise --seq, or look at the data"
            )
        lines += remarks(examples.sequences, config) + few_warning(len(examples), what, config)
        return "\n".join([*lines, *rendered(examples.sequences.rendered)])

    def shapes(self, config: Config, examples: list[Preferences], *, dtype: str) -> Batch:
        longest = config.train.seq
        if examples:
            longest = min(longest, align_up(max(one.longest for one in examples), 8))
        shape = torch.empty((2 * config.train.batch, longest), dtype=torch.long, device="meta")
        return {"input_ids": shape, "attention_mask": shape, "labels": shape}

    def rows(self, batch: Batch) -> int:
        return len(batch["input_ids"]) // 2

    def part(self, batch: Batch, start: int, stop: int) -> Batch:
        count = self.rows(batch)
        if start == stop:  # an empty part becomes one row without weight
            return self.part(batch, 0, 1) | {"weight": 0.0}
        part = {
            name: torch.cat([value[start:stop], value[count + start : count + stop]])
            for name, value in batch.items()
            if name in ("input_ids", "attention_mask", "labels", "reference")
        }
        if "desirable" in batch:
            part["desirable"] = batch["desirable"][start:stop]
        whole = {name: batch[name] for name in ("objective", "stats") if name in batch}
        return part | whole | {"weight": 1.0, "of": count, "of_tokens": _first_tokens(batch)}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss over the rows of the whole batch, and put rewards in its `stats`."""
        config: PreferenceConfig = batch["objective"]
        ids, labels = batch["input_ids"], batch["labels"]
        mask = batch.get("attention_mask", torch.ones_like(ids))
        count = self.rows(batch)
        scale = batch.get("weight", 1.0) / batch.get("of", count)
        wanted = labels.clone()
        if config.loss == "orpo":  # ORPO also has a loss on the prompt.
            wanted[:count] = ids[:count].masked_fill(mask[:count] == 0, IGNORE)
        labelled = wanted[:, 1:] != IGNORE
        row = labelled.nonzero()[:, 0]
        answer = (labels[:, 1:] != IGNORE)[labelled]
        counts = (labels[:, 1:] != IGNORE).sum(1)

        def sums(values: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(2 * count).index_add(0, row[which], values[which])

        def logp_loss(logps: torch.Tensor, all_reduce_sum: AllReduceSum) -> torch.Tensor:
            whole = None
            # Each rank contributes its tokens' share of the mean over all ranks.
            if config.loss == "orpo":
                tokens = batch.get("of_tokens") or _first_tokens(batch)
                share = logps[row < count].sum() / tokens
                whole = (share * (batch.get("of", count) / count)).expand(count)

            def mean(values: torch.Tensor) -> float:
                return all_reduce_sum(float(values.mean()) * (scale * count))

            answers = Answers(
                sums(logps, answer),
                counts,
                batch.get("reference"),
                whole,
                batch.get("desirable"),
                mean,
            )
            losses, rewards = LOSSES[config.loss](answers, config)
            note(batch.get("stats"), *answers.halves(rewards.detach()), answers.desirable, mean)
            total: torch.Tensor = losses.sum() * scale
            return total

        inputs = {"input_ids": ids, "attention_mask": mask}
        return logp_loss_of(model, inputs, wanted, logp_loss)

    def before_training(
        self, session: Session, examples: Preferences, config: Config, progress: OnProgress
    ) -> None:
        """Compute the log-probabilities of the reference, or read them if the run is resumed.

        Before its first step, the model is its own reference. Raise ModelError if the head cannot
        provide log-probabilities of tokens.
        """
        if session.head is None:
            raise ModelError(
                f"{config.model}: {type(session.model).__name__} has a loss of its own, and "
                "preferences need log-probabilities of tokens; give a causal "
                "language model with a plain head"
            )
        if config.preference.loss not in WITH_REFERENCE:
            return
        file = examples.sequences.folder / f"reference-{examples.digest()}.npy"
        # Before the first step, do not trust an existing file: an earlier attempt to start this run
        # may have used another model.
        if not session.step:
            logps = self._reference_logps(session, examples, progress)
            if session.process_group.ranks.first:
                write_reference(file, logps)
            session.process_group.barrier()
        elif not file.is_file():
            raise DataError(
                f"{file}: the reference's log-probabilities are missing, and the model has "
                "changed since; restore the file, or train again with another --out"
            )
        examples.reference = read_reference(file, examples.total)

    def _reference_logps(
        self, session: Session, examples: Preferences, progress: OnProgress
    ) -> np.ndarray:
        logps = np.zeros((examples.total, 2), dtype=np.float32)
        done, group = 0, session.process_group
        with forward_only(session.model):
            for batch in examples.passes(examples.batch_rows):
                count = self.rows(batch)
                start, stop = group.ranks.rows(count)
                part_logps = answer_logps(session.model, self.part(batch, start, stop))
                own_logps = [] if start == stop else part_logps.reshape(2, -1).T.tolist()
                every = [row for rank in group.all_gather_object(own_logps) for row in rank]
                logps[examples.members[done : done + count]] = every
                done += count
                progress("reference", done, len(examples))
        return logps


def check_kind(dataset: Dataset, *, rated: bool, option: str, what: str) -> None:
    if bool(dataset.ratings) != rated:
        required, given_fields = ("prompt+completion+label", "prompt+chosen+rejected")[
            :: 1 if rated else -1
        ]
        raise DataError(f"{option} has {given_fields}, {what} wants {required}; give the other one")


def _first_tokens(batch: Batch) -> int:
    """Return the number of tokens in the first half of the rows, except each row's first token."""
    count = len(batch["input_ids"]) // 2
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return int(mask[:count, 1:].sum())


# -- The losses ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of the answers of a batch, summed over tokens, and their token counts."""

    logps: torch.Tensor  # first half: chosen or rated; second half: rejected or mismatched
    counts: torch.Tensor
    reference: torch.Tensor | None
    # Mean log-probability of the tokens of prompt and chosen answer; only ORPO needs it.
    prompt_and_chosen: torch.Tensor | None
    desirable: torch.Tensor | None  # for rated answers: whether each is desirable
    mean: Callable[[torch.Tensor], float]  # averages a value per row over all ranks

    def halves(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = values.chunk(2)
        return first, second

    @property
    def ratios(self) -> torch.Tensor:
        assert self.reference is not None
        return self.logps - self.reference


def dpo(a: Answers, c: PreferenceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return DPO losses and rewards.

    A loss is -log sigmoid of beta times the difference in log-ratios.
    """
    chosen, rejected = a.halves(a.ratios)
    return -logsigmoid(c.beta * (chosen - rejected)), c.beta * a.ratios


def ipo(a: Answers, c: PreferenceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return IPO losses and rewards.

    A loss is the squared distance of the difference in log-ratios per token from 1 / (2 beta).
    """
    chosen, rejected = a.halves(a.ratios / a.counts)
    return (chosen - rejected - 1 / (2 * c.beta)) ** 2, c.beta * a.ratios


def simpo(a: Answers, c: PreferenceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return SimPO losses and rewards, from log-probabilities per token and a margin.

    There is no reference model.
    """
    mean = a.logps / a.counts
    chosen, rejected = a.halves(mean)
    return -logsigmoid(c.beta * (chosen - rejected) - c.margin), c.beta * mean


def orpo(a: Answers, c: PreferenceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ORPO losses and rewards.

    A loss is that of prompt and chosen answer, plus beta times the loss of the odds ratio.
    """
    mean = a.logps / a.counts
    assert a.prompt_and_chosen is not None
    odds = mean - torch.log(-torch.expm1(mean))
    chosen, rejected = a.halves(odds)
    return -a.prompt_and_chosen - c.beta * logsigmoid(chosen - rejected), c.beta * mean


def kto(a: Answers, c: PreferenceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return KTO losses and rewards.

    Relative to the reference model, a desirable answer should gain more log-probability than
    mismatched answers do on average, and an undesirable answer should gain less.
    """
    assert a.desirable is not None
    gains, mismatched = a.halves(a.ratios)
    distance = max(0.0, a.mean(mismatched.detach()))
    sign = torch.where(a.desirable, 1.0, -1.0)
    weight = torch.where(a.desirable, c.desirable, c.undesirable)
    rewards = torch.cat([c.beta * gains, torch.zeros_like(gains)])
    return weight * (1 - torch.sigmoid(c.beta * sign * (gains - distance))), rewards


CRC_BYTES = 4  # length of the checksum after the array in a reference file

LOSSES = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo, "kto": kto}


def logp_loss_of(
    model: nn.Module, inputs: Batch, labels: torch.Tensor, logp_loss: LogpLoss
) -> torch.Tensor:
    """Return the loss computed by `logp_loss`, using the head in slices."""
    loss: torch.Tensor = model(**inputs, labels=labels, logp_loss=logp_loss).loss
    return loss


def note(
    stats: Stats | None,
    first: torch.Tensor,
    second: torch.Tensor,
    desirable: torch.Tensor | None,
    mean: Callable[[torch.Tensor], float],
) -> None:
    """Store the mean rewards over all ranks in `stats` and, for pairs, accuracy and margin.

    `first` and `second` are the rewards of both halves of the batch. `desirable` states for rated
    answers whether each is desirable, and is None for pairs. All ranks must call this function,
    because `mean` averages over ranks.
    """
    if stats is None:
        return
    if desirable is not None:
        for name, which in (("reward_chosen", desirable), ("reward_rejected", ~desirable)):
            if (share := mean(which.float())) > 0:
                stats[name] = mean(first * which) / share, share
        return
    new_values = {"accuracy": (first > second).float(), "margin": first - second}
    for name, values in (new_values | {"chosen": first, "rejected": second}).items():
        stats[f"reward_{name}"] = mean(values), 1.0


def write_reference(file: Path, logps: np.ndarray) -> None:
    """Write the reference's log-probabilities as an .npy file followed by its CRC-32C."""
    data = io.BytesIO()
    np.save(data, logps)
    data.write(checksum(data.getvalue()).to_bytes(CRC_BYTES, "little"))
    try:
        write_atomic(file, data.getvalue())
    except OSError as error:
        raise StorageIOError(
            f"{file}: the reference's log-probabilities cannot be written: {error.strerror}; free "
            "some space, then go on"
        ) from None


def read_reference(file: Path, rows: int) -> np.ndarray:
    """Return the reference's log-probabilities in a file, two for each of `rows` rows.

    Raise an error if the file is damaged or has another number of rows.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}; restore it") from None
    array, expected = data[:-CRC_BYTES], int.from_bytes(data[-CRC_BYTES:], "little")
    if not array or checksum(array) != expected:
        raise DataError(
            f"{file}: damaged: its checksum is {checksum(array):08x}, and {expected:08x} was "
            "written; restore it, or train again with another --out"
        )
    logps: np.ndarray = np.load(io.BytesIO(array), allow_pickle=False)
    if logps.shape != (rows, 2) or logps.dtype != np.float32:
        raise DataError(
            f"{file}: holds {logps.dtype} of shape {list(logps.shape)}, the data has {rows} rows "
            "of 2 in float32; restore it"
        )
    return logps


def answer_logps(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the log-probabilities of the answers of a batch, summed over their tokens."""
    labels = batch["labels"]
    row = (labels[:, 1:] != IGNORE).nonzero()[:, 0]
    sums = []

    def keep(logps: torch.Tensor, _: AllReduceSum) -> torch.Tensor:
        sums.append(logps.new_zeros(len(labels)).index_add(0, row, logps))
        return logps.sum()

    inputs = {k: v for k, v in batch.items() if k in ("input_ids", "attention_mask")}
    logp_loss_of(model, inputs, labels, keep)
    return sums[0].cpu()


# -- Reward models: a score for each answer, higher for chosen than for rejected ones --------------
#
# A causal language model gets a new head with one score, which replaces its own and is drawn from
# the run's seed. A sequence classification model with one label keeps its head.


class Reward(Preference):
    PIPELINE = ""

    def check(self, config: Config) -> None:
        super().check(config)
        if config.sample.prompts:
            raise ConfigError("--sample-prompts: a reward model generates no text; leave it out")

    def load(self, config: Config, *, dtype: str) -> nn.Module:
        loaded = reward_config(config.model)
        encoder = Encoder(config.model, template=config.train.chat_template)
        encoder.tokenizer(str(config.model))
        text: Any = loaded.get_text_config()
        # The score is read at the last token before the padding.
        text.pad_token_id = encoder.pad_id(getattr(text, "vocab_size", None))
        with offline():
            model = build_model(config.model, dtype=dtype_of(STATE_FORMATS[dtype]), config=loaded)
            if is_causal(load_config(config.model)):
                draw_head(model, seed=config.seed)
            if config.train.adapter is not None:
                return add_lora(model, config.train.adapter)
        return model

    def prepare(self, data: DataRequest) -> Preferences:
        dataset = tokenised(data, reward_config(data.config.model), preferences=True)
        check_kind(dataset, rated=False, option=data.option, what="--task reward")
        return Preferences(
            dataset, np.arange(dataset.summary.examples // 2), data.config.train.batch
        )

    def shapes(self, config: Config, examples: list[Preferences], *, dtype: str) -> Batch:
        shapes = super().shapes(config, examples, dtype=dtype)
        return {name: shape for name, shape in shapes.items() if name != "labels"}

    def part(self, batch: Batch, start: int, stop: int) -> Batch:
        # Every rank has its own dictionary, which `loss` fills in.
        return super().part(batch, start, stop) | {"stats": {}}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss over the pairs, and put rewards in the `stats` of the batch."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
        chosen, rejected = model(**inputs).logits.squeeze(-1).float().chunk(2)
        note(
            batch.get("stats"), chosen.detach(), rejected.detach(), None, lambda x: float(x.mean())
        )
        return -logsigmoid(chosen - rejected).mean()

    def before_training(
        self, session: Session, examples: Preferences, config: Config, progress: OnProgress
    ) -> None:
        """Do nothing, because reward models have no reference."""
