"""Preference tuning: what is wanted against what is not, over log-probabilities of whole answers.

The reference is never a second model: its log-probabilities are those of the model before its
first step, made in one forward-only pass over the data and kept with it. (A fresh adapter adds
nothing, so with LoRA too that is the base.) Full logits never exist: the head gives the
log-probabilities of tokens, and takes back what each of them weighs.
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
from lohan.data.images import read_npy
from lohan.data.supervised import Preferences
from lohan.engine.head import LogpLoss
from lohan.engine.session import Session
from lohan.errors import ConfigError, DataError, ModelError, StorageIOError, first_line
from lohan.model.state import STATE_FORMATS
from lohan.train.forward_only import forward_only
from lohan.train.language import CausalLM, remarks, tokenised
from lohan.train.task import Batch, DataRequest, OnProgress, Stats, Task, few_warning, rendered
from lohan.util.files import write_atomic
from lohan.util.system import offline
from lohan.util.units import align_up, counted

AllReduceSum = Callable[[float], float]  # over all ranks
WITH_REFERENCE = ("dpo", "ipo", "kto")


class Preference(Task[Preferences]):
    """Rows are pairs of answers, or rated ones."""

    def check(self, config: Config) -> None:
        if config.train.pack:
            raise ConfigError("--pack: pairs of answers are not packed; leave it out")

    def load(self, config: Config, *, dtype: str) -> nn.Module:
        return CausalLM().load(config, dtype=dtype)

    def prepare(self, data: DataRequest) -> Preferences:
        made, config = (
            tokenised(data, causal_config(data.config.model), preferences=True),
            data.config,
        )
        rated = config.preference.loss == "kto"
        check_kind(made, rated=rated, option=data.option, what=f"--loss {config.preference.loss}")
        rows = made.summary.examples // (1 if rated else 2)
        return Preferences(made, np.arange(rows), config.train.batch, config.preference)

    def describe(self, examples: Preferences, config: Config) -> str:
        found = examples.sequences.summary
        what = counted(len(examples), "rated answer" if examples.rated else "pair")
        note = f"{what}, {counted(found.tokens, 'token')}, {found.trained_tokens:,} in answers"
        if found.cut:
            answers = counted(found.examples, "answer")
            note += f"; {found.cut:,} of {answers} cut to {config.train.seq} tokens"
        lines = [note]
        if found.dropped:
            lines.append(
                f"warning: {found.dropped:,} dropped: the first {config.train.seq} tokens hold no "
                "answer; raise --seq, or look at the data"
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
        if start == stop:  # one that has no weight
            return self.part(batch, 0, 1) | {"weight": 0.0}
        made = {
            name: torch.cat([value[start:stop], value[count + start : count + stop]])
            for name, value in batch.items()
            if name in ("input_ids", "attention_mask", "labels", "reference")
        }
        if "desirable" in batch:
            made["desirable"] = batch["desirable"][start:stop]
        whole = {name: batch[name] for name in ("objective", "stats") if name in batch}
        return made | whole | {"weight": 1.0, "of": count, "of_tokens": _first_tokens(batch)}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean over the rows of the whole batch; rewards go to its `stats`."""
        config: PreferenceConfig = batch["objective"]
        ids, labels = batch["input_ids"], batch["labels"]
        mask = batch.get("attention_mask", torch.ones_like(ids))
        count = self.rows(batch)
        scale = batch.get("weight", 1.0) / batch.get("of", count)
        wanted = labels.clone()
        if config.loss == "orpo":  # the prompt too
            wanted[:count] = ids[:count].masked_fill(mask[:count] == 0, IGNORE)
        labelled = wanted[:, 1:] != IGNORE
        row = labelled.nonzero()[:, 0]
        answer = (labels[:, 1:] != IGNORE)[labelled]
        counts = (labels[:, 1:] != IGNORE).sum(1)

        def sums(values: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(2 * count).index_add(0, row[which], values[which])

        def logp_loss(logps: torch.Tensor, all_reduce_sum: AllReduceSum) -> torch.Tensor:
            whole = None
            if config.loss == "orpo":  # each rank has its tokens' part of the mean over all of them
                tokens = batch.get("of_tokens") or _first_tokens(batch)
                share = logps[row < count].sum() / tokens
                whole = (share * (batch.get("of", count) / count)).expand(count)

            def mean(values: torch.Tensor) -> float:
                return all_reduce_sum(float(values.mean()) * (scale * count))

            answers = Answers(
                sums(logps, answer), counts, batch.get("reference"), whole, batch.get("desirable"),
                mean,
            )  # fmt: skip
            losses, rewards = LOSSES[config.loss](answers, config)
            note(batch.get("stats"), *answers.halves(rewards.detach()), answers.desirable, mean)
            total: torch.Tensor = losses.sum() * scale
            return total

        inputs = {"input_ids": ids, "attention_mask": mask}
        return logp_loss_of(model, inputs, wanted, logp_loss)

    def before_training(
        self, session: Session, examples: Preferences, config: Config, progress: OnProgress
    ) -> None:
        """Finds the reference's log-probabilities, or makes them: before its first step the model
        is its own reference. Refuses a head of which token log-probabilities cannot be had."""
        if session.head is None:
            raise ModelError(
                f"{config.model}: {type(session.model).__name__} has a loss of its own, and "
                "preferences need log-probabilities of tokens; give a causal "
                "language model with a plain head"
            )
        if config.preference.loss not in WITH_REFERENCE:
            return
        file = examples.sequences.folder / f"reference-{examples.digest()}.npy"
        if not session.step:  # one that is there may be of another model that a start began with
            found = self._reference_logps(session, examples, progress)
            if session.process_group.ranks.first:
                write_reference(file, found)
            session.process_group.barrier()
        elif not file.is_file():
            raise DataError(
                f"{file}: the reference's log-probabilities are not there, and the model has "
                "changed since; restore the file, or train again with another --out"
            )
        examples.reference = read_reference(file, examples.total)

    def _reference_logps(
        self, session: Session, examples: Preferences, progress: OnProgress
    ) -> np.ndarray:
        found = np.zeros((examples.total, 2), dtype=np.float32)
        done, group = 0, session.process_group
        with forward_only(session.model):
            for batch in examples.passes(examples.batch_rows):
                count = self.rows(batch)
                start, stop = group.ranks.rows(count)
                own = answer_logps(session.model, self.part(batch, start, stop))
                mine = [] if start == stop else own.reshape(2, -1).T.tolist()
                every = [row for rank in group.all_gather_object(mine) for row in rank]
                found[examples.members[done : done + count]] = every
                done += count
                progress("reference", done, len(examples))
        return found


def check_kind(made: Dataset, *, rated: bool, option: str, what: str) -> None:
    if bool(made.ratings) != rated:
        wants, has = ("prompt+completion+label", "prompt+chosen+rejected")[:: 1 if rated else -1]
        raise DataError(f"{option} has {has}, {what} wants {wants}; give the other one")


def _first_tokens(batch: Batch) -> int:
    """Tokens of the first half that follow another one."""
    count = len(batch["input_ids"]) // 2
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return int(mask[:count, 1:].sum())


# -- the losses ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of the answers of a batch: sums over tokens, and how many they have."""

    logps: torch.Tensor  # first half: chosen, or rated; second half: rejected, or mismatched
    counts: torch.Tensor
    reference: torch.Tensor | None
    prompt_and_chosen: torch.Tensor | None  # mean over the tokens of both, for orpo
    desirable: torch.Tensor | None  # of rated answers
    mean: Callable[[torch.Tensor], float]  # of a value for each row, over all ranks

    def halves(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = values.chunk(2)
        return first, second

    @property
    def ratios(self) -> torch.Tensor:
        assert self.reference is not None
        return self.logps - self.reference


def dpo(a: Answers, c: PreferenceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """-log sigmoid of beta times how much more the chosen gained on the reference."""
    chosen, rejected = a.halves(a.ratios)
    return -logsigmoid(c.beta * (chosen - rejected)), c.beta * a.ratios


def ipo(a: Answers, c: PreferenceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The gain per token, squared around 1 / (2 beta)."""
    chosen, rejected = a.halves(a.ratios / a.counts)
    return (chosen - rejected - 1 / (2 * c.beta)) ** 2, c.beta * a.ratios


def simpo(a: Answers, c: PreferenceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability per token instead of a reference, with a margin."""
    mean = a.logps / a.counts
    chosen, rejected = a.halves(mean)
    return -logsigmoid(c.beta * (chosen - rejected) - c.margin), c.beta * mean


def orpo(a: Answers, c: PreferenceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of prompt and chosen answer, and beta times that of the odds of the answers."""
    mean = a.logps / a.counts
    assert a.prompt_and_chosen is not None
    odds = mean - torch.log(-torch.expm1(mean))
    chosen, rejected = a.halves(odds)
    return -a.prompt_and_chosen - c.beta * logsigmoid(chosen - rejected), c.beta * mean


def kto(a: Answers, c: PreferenceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """1 - sigmoid of the gain on the reference beyond what mismatched answers gained, or of the
    reverse where the answer is not wanted."""
    assert a.desirable is not None
    gains, mismatched = a.halves(a.ratios)
    distance = max(0.0, a.mean(mismatched.detach()))
    sign = torch.where(a.desirable, 1.0, -1.0)
    weight = torch.where(a.desirable, c.desirable, c.undesirable)
    rewards = torch.cat([c.beta * gains, torch.zeros_like(gains)])
    return weight * (1 - torch.sigmoid(c.beta * sign * (gains - distance))), rewards


LOSSES = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo, "kto": kto}


def logp_loss_of(
    model: nn.Module, inputs: Batch, labels: torch.Tensor, logp_loss: LogpLoss
) -> torch.Tensor:
    """Through the head in slices."""
    found: torch.Tensor = model(**inputs, labels=labels, logp_loss=logp_loss).loss
    return found


def note(
    stats: Stats | None, first: torch.Tensor, second: torch.Tensor,
    desirable: torch.Tensor | None, mean: Callable[[torch.Tensor], float],
) -> None:  # fmt: skip
    """Rewards of the whole batch. All ranks take part."""
    if stats is None:
        return
    if desirable is not None:
        for name, which in (("reward_chosen", desirable), ("reward_rejected", ~desirable)):
            if (share := mean(which.float())) > 0:
                stats[name] = mean(first * which) / share, share
        return
    found = {"accuracy": (first > second).float(), "margin": first - second}
    for name, values in (found | {"chosen": first, "rejected": second}).items():
        stats[f"reward_{name}"] = mean(values), 1.0


def write_reference(file: Path, found: np.ndarray) -> None:
    data = io.BytesIO()
    np.save(data, found)
    try:
        write_atomic(file, data.getvalue())
    except OSError as error:
        raise StorageIOError(
            f"{file}: the reference's log-probabilities cannot be written: {error.strerror}; free "
            "some space, then go on"
        ) from None


def read_reference(file: Path, rows: int) -> np.ndarray:
    try:
        loaded = read_npy(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {first_line(error)}; restore it") from None
    if loaded.shape != (rows, 2) or loaded.dtype != np.float32:
        raise DataError(
            f"{file}: holds {loaded.dtype} of shape {list(loaded.shape)}, the data has {rows} rows "
            "of 2 in float32; restore it"
        )
    return loaded


def answer_logps(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Log-probabilities of the answers of a batch, summed over their tokens."""
    labels = batch["labels"]
    row = (labels[:, 1:] != IGNORE).nonzero()[:, 0]
    found = []

    def keep(logps: torch.Tensor, _: AllReduceSum) -> torch.Tensor:
        found.append(logps.new_zeros(len(labels)).index_add(0, row, logps))
        return logps.sum()

    inputs = {k: v for k, v in batch.items() if k in ("input_ids", "attention_mask")}
    logp_loss_of(model, inputs, labels, keep)
    return found[0].cpu()


# -- Reward models: a score for each answer, so that chosen ones have more than rejected ones ------
#
# A causal language model gets a new head with one score in the place of its own, drawn from the
# run's seed; a model for sequence classification with one label goes on with the one it has.


class Reward(Preference):
    def check(self, config: Config) -> None:
        super().check(config)
        if config.sample.prompts:
            raise ConfigError("--sample-prompts: a reward model writes nothing; leave it out")

    def load(self, config: Config, *, dtype: str) -> nn.Module:
        found = reward_config(config.model)
        encoder = Encoder(config.model, template=config.train.chat_template)
        encoder.tokenizer(str(config.model))
        text: Any = found.get_text_config()
        text.pad_token_id = encoder.pad_id(getattr(text, "vocab_size", None))  # no score behind
        with offline():
            model = build_model(config.model, dtype=dtype_of(STATE_FORMATS[dtype]), config=found)
            if is_causal(load_config(config.model)):
                draw_head(model, seed=config.seed)
            if config.train.adapter is not None:
                return add_lora(model, config.train.adapter)
        return model

    def prepare(self, data: DataRequest) -> Preferences:
        made = tokenised(data, reward_config(data.config.model), preferences=True)
        check_kind(made, rated=False, option=data.option, what="--task reward")
        return Preferences(made, np.arange(made.summary.examples // 2), data.config.train.batch)

    def shapes(self, config: Config, examples: list[Preferences], *, dtype: str) -> Batch:
        made = super().shapes(config, examples, dtype=dtype)
        return {name: shape for name, shape in made.items() if name != "labels"}

    def part(self, batch: Batch, start: int, stop: int) -> Batch:
        return super().part(batch, start, stop) | {"stats": {}}  # of a rank's own rows

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean over the pairs; rewards go to the `stats` of the batch."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
        chosen, rejected = model(**inputs).logits.squeeze(-1).float().chunk(2)
        note(
            batch.get("stats"), chosen.detach(), rejected.detach(), None, lambda x: float(x.mean())
        )
        return -logsigmoid(chosen - rejected).mean()

    def before_training(
        self, session: Session, examples: Preferences, config: Config, progress: OnProgress
    ) -> None:
        """There is no reference."""
