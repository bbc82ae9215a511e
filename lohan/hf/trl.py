"""TRL's trainers, out of core: SFT, preferences, reward models.

Losses, data and metrics are TRL's. TRL's losses call a model to get the log-probabilities of
tokens. Here they call a stand-in instead. LoHan's head computes the log-probabilities in slices
over the streamed model, and propagates the gradient of each token. The reference is never a second
model in memory: its log-probabilities are computed in one forward-only pass before the first step
and stored in the output folder.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from torch import nn
from transformers.utils import logging

from lohan.capture.placeholders import lacks_values
from lohan.checkpoint.adapters import base_of
from lohan.engine.head import IGNORED
from lohan.engine.session import Session
from lohan.errors import ConfigError, DataError, ModelError
from lohan.hf.arguments import LohanArguments
from lohan.hf.mixin import LohanMixin, loss_of_all_ranks, merged
from lohan.train.evaluation import forward_only
from lohan.train.preference import read_reference, write_reference
from lohan.util.units import format_bytes

try:
    import trl
except ImportError:
    raise ConfigError(
        "lohan.hf's trainers of TRL need the package trl, which is not installed or too "
        "old; pip install 'lohan[trl]'"
    ) from None

logger = logging.get_logger(__name__)
TheirDPO = trl.DPOTrainer
TheirKTO = trl.KTOTrainer
TheirReward = trl.RewardTrainer
ROW = "lohan_row"  # dataset column: index of the row in the reference values
SLICE = 64  # tokens per slice when metrics are computed
Part = dict[str, torch.Tensor]  # a call of the model: input_ids, attention_mask, labels and more


class TokenMetrics:
    """A collection of the values that TRL's metrics need for labelled tokens, slice by slice."""

    def __init__(self) -> None:
        self._values: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        for part, right in zip(logits.split(SLICE), labels.split(SLICE), strict=True):
            values = part.float()
            logs = values.log_softmax(-1)
            entropy = -(logs.exp() * logs).sum(-1)
            squares = (2 * logs).logsumexp(-1)
            top = logs.argmax(-1) == right
            self._values.append((entropy, squares, values.mean(-1), top))

    def take(self) -> dict[str, torch.Tensor]:
        names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        columns = map(torch.cat, zip(*self._values, strict=True))
        self._values = []
        return dict(zip(names, columns, strict=True))


class Answer:
    """An imitation of the output of TRL's fused head: values per token, zero without a label."""

    aux_loss: torch.Tensor

    def __init__(self, labels: torch.Tensor, flat: Mapping[str, torch.Tensor]) -> None:
        self.labelled = labels[:, 1:] != IGNORED
        for name, values in flat.items():
            empty = values.new_zeros(self.labelled.shape)
            setattr(self, name, empty.masked_scatter(self.labelled, values))
        self.aux_loss = flat["log_probs"].new_zeros(())


class StandIn:
    """A stand-in for the model in TRL's losses; its calls return values computed beforehand."""

    def __init__(self, parts: Sequence[Part], flat: Mapping[str, torch.Tensor]) -> None:
        counts = [int((part["labels"][:, 1:] != IGNORED).sum()) for part in parts]
        split = {name: values.split(counts) for name, values in flat.items()}
        self.parts, self._flat = parts, split

    def answer(self, number: int) -> Answer:
        flat = {name: values[number] for name, values in self._flat.items()}
        return Answer(self.parts[number]["labels"], flat)

    def __call__(self, *, input_ids: torch.Tensor, fused_lm_head: bool = False, **_: Any) -> Any:
        if not fused_lm_head:
            return None  # logits are computed afterwards
        same = (torch.equal(part["input_ids"], input_ids) for part in self.parts)
        return self.answer(next(number for number, equal in enumerate(same) if equal))


Compute = Callable[[StandIn], torch.Tensor]


class OverTokens(LohanMixin):
    """A trainer whose TRL loss is computed from the log-probabilities of tokens."""

    over_tokens = True

    def _parts(self, inputs: Mapping[str, Any]) -> list[Part]:
        """Return the inputs of each model call of the loss; only the first call has gradients."""
        raise NotImplementedError

    def attach(self, inputs: Mapping[str, Any], *, lasting: bool = True) -> Session:
        if self.session is not None and not self.session.closed:
            return self.session
        vars(base_of(self.model)).pop("forward", None)  # TRL's head
        session = super().attach(merged(self._parts(inputs)), lasting=lasting)
        if session.head is None:
            raise ModelError(
                f"{type(base_of(self.model)).__name__} has a loss of its own, and preferences "
                "need log-probabilities of tokens; give a causal language model with a plain head"
            )
        session.head.on_logits = self._token_metrics = TokenMetrics()
        return session

    def _joined_batch(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the batch if there is only one, or None for several.

        Several batches cannot be joined, because the loss is a mean over each batch.
        """
        return dict(parts[0]) if len(parts) == 1 else None

    @property
    def _routes(self) -> bool:
        """True if the experts of the model have an auxiliary loss."""
        return bool(getattr(self, "aux_loss_enabled", False))

    def _call(self, model: Any, parts: Sequence[Part], compute: Compute) -> Any:
        """Run the model on all parts, and return its output with the loss that `compute` returns.

        `compute` gets a stand-in for the model, whose calls return the values of each part.
        """
        before: dict[str, list[torch.Tensor]] = {}
        if self._routes and len(parts) > 1:  # only the first call has the auxiliary loss
            for part in parts[1:]:
                with torch.no_grad():
                    self._one(model, part, lambda flat: _collect(before, flat), routes=False)
            call = parts[0]
        else:
            call = merged(parts)

        def loss(flat: dict[str, torch.Tensor]) -> torch.Tensor:
            every = {n: torch.cat([v, *before.get(n, ())]) for n, v in flat.items()}
            return compute(StandIn(parts, every))

        return self._one(model, call, loss, routes=self._routes and torch.is_grad_enabled())

    def _one(
        self,
        model: Any,
        part: Part,
        loss: Callable[[dict[str, torch.Tensor]], torch.Tensor],
        *,
        routes: bool,
    ) -> Any:
        assert self.session is not None
        world = self.session.process_group.world  # DDP would average the losses over it

        def logp_loss(logps: torch.Tensor, _: Any) -> torch.Tensor:
            return loss({"log_probs": logps, **self._token_metrics.take()}) / world

        more = {"output_router_logits": True} if routes else {}
        return model(**part, use_cache=False, logp_loss=logp_loss, **more)

    def _auxiliary(self, out: Any) -> torch.Tensor:
        """Return the loss, with the auxiliary loss of the experts weighted as TRL does.

        The model has already added it with the coefficient of its config, so only the
        difference is added here.
        """
        loss: torch.Tensor = out.loss
        if getattr(out, "aux_loss", None) is None:
            return loss
        assert self.session is not None
        config = base_of(self.model).config.get_text_config()  # type: ignore[union-attr, operator]
        coefficient = getattr(config, "router_aux_loss_coef", 0.0)
        missing = (getattr(self, "router_aux_loss_coef", coefficient) - coefficient) * out.aux_loss
        scale = self.session.executor.record.train_state.loss_scale
        value = missing.detach()
        return loss + value + scale * (missing - value) / self.session.process_group.world


def _collect(
    collected: dict[str, list[torch.Tensor]], flat: dict[str, torch.Tensor]
) -> torch.Tensor:
    for name, values in flat.items():
        collected.setdefault(name, []).append(values.detach())
    return flat["log_probs"].sum()


# -- Trainers with a reference model ---------------------------------------------------------------


class NoReference(nn.Module):
    """A placeholder for the reference model. Without it, TRL would load a model."""

    class config:
        @staticmethod
        def get_text_config() -> None: ...


class WithReference(OverTokens):
    """The common part of DPO and KTO.

    Dataset rows are numbered, so that the reference values of a batch can be looked up.
    """

    COLUMNS: tuple[str, str]  # batch columns of the reference's log-probabilities
    TOKENS: tuple[str, ...]  # dataset columns of tokens
    data_collator: Any
    _signature_columns: Any
    ref_model: Any

    def __init__(self, *positional: Any, lohan: LohanArguments | None = None, **named: Any) -> None:
        signature = inspect.signature(super(LohanMixin, self).__init__)
        named = signature.bind_partial(*positional, **named).arguments
        ref_model, args = named.get("ref_model"), named.get("args")
        if args is not None:
            if getattr(args, "sync_ref_model", False):
                raise ConfigError(
                    "sync_ref_model cannot be used with lohan.hf: the reference is not a "
                    "model; its log-probabilities are computed once; leave it out"
                )
            args.precompute_ref_log_probs = False  # LoHan computes them with the streamed model
        if ref_model is not None and any(lacks_values(p) for p in ref_model.parameters()):
            raise ConfigError(
                "ref_model has no values in memory; leave it out: the reference is the model as it "
                "is before its first step"
            )
        self._without_adapter = named.get("peft_config") is not None
        if ref_model is None and not self._without_adapter and _has_no_rows(named):
            ref_model = _copied(named.get("model"))
        self._reference_model = ref_model
        self._tables: list[Any] = []  # datasets
        self._starts = [0]  # number of the first row of each dataset
        self._reference: dict[int, np.ndarray] = {}  # by dataset, [rows, 2]
        super().__init__(lohan=lohan, **{**named, "ref_model": ref_model or NoReference()})
        if ref_model is None:
            self.accelerator._models = [m for m in self.accelerator._models if m is self.model]
        self.ref_model = None
        self.precompute_ref_logps = True  # batches contain the reference values
        if not self._tables and not self._without_adapter and ref_model is None:
            raise ConfigError(
                f"{type(self).__name__}: the reference's log-probabilities are computed before the "
                "first step, which needs a dataset with rows (no IterableDataset, no images); or "
                "train an adapter (peft_config), which is switched off for the reference"
            )
        self.data_collator = _with_rows(self.data_collator)

    def _prepare_dataset(self, dataset: Any, *args: Any, **named: Any) -> Any:
        prepared = super()._prepare_dataset(dataset, *args, **named)  # type: ignore[misc]
        if not hasattr(prepared, "add_column") or not hasattr(prepared, "__len__"):
            return prepared
        if ROW in prepared.column_names:
            return prepared
        start = self._starts[-1]
        prepared = prepared.add_column(ROW, np.arange(start, start + len(prepared)))
        self._tables.append(prepared)
        self._starts.append(start + len(prepared))
        return prepared

    def _precompute_ref_logps(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        if ROW not in self._signature_columns:
            self._signature_columns.append(ROW)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run a step; before the first one, compute the reference values of all datasets."""
        if len(self._reference) < len(self._tables):
            self.attach(inputs)
            for number in range(len(self._tables)):
                self._reference_of(number)
        return super().training_step(model, inputs, num_items_in_batch)

    def _reference_of(self, number: int) -> np.ndarray:
        """Return the reference values of a dataset, as an array of shape [rows, 2].

        They come from memory, from the output folder if training resumes, or from a new
        pass.
        """
        if number in self._reference:
            return self._reference[number]
        assert self.session is not None
        file = Path(self.args.output_dir) / f"lohan-reference-{self._digest(number)}.npy"
        table = self._tables[number]
        if self._resumption.active and file.is_file():
            reference = read_reference(file, len(table))
        elif (
            (self._resumption.active or self.state.global_step)
            and not self._without_adapter
            and self._reference_model is None
        ):
            raise DataError(
                f"{file}: the reference's log-probabilities are missing, and the model has "
                "changed since; restore the file, or start a new training"
            )
        else:
            reference = self._compute_reference(table)
            if self._keeps_session and self.session.process_group.ranks.first:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_reference(file, reference)
        self._reference[number] = reference
        return reference

    def _digest(self, number: int) -> str:
        """Return a digest of all settings and tokens that the reference values depend on."""
        args = self.args
        about = [
            getattr(args, n, None)
            for n in ("max_length", "truncation_mode", "ld_alpha", "per_device_train_batch_size")
        ]
        digest = hashlib.sha256(repr(about).encode())
        columns = [name for name in self.TOKENS if name in self._tables[number].column_names]
        for rows in self._tables[number].select_columns(columns).iter(1000):
            digest.update(repr(rows).encode())
        return digest.hexdigest()[:16]

    def _compute_reference(self, table: Any) -> np.ndarray:
        """Compute the reference values of a dataset in one forward-only pass.

        Each process computes its share of every batch.
        """
        assert self.session is not None
        group, args = self.session.process_group, self.args
        size = args.precompute_ref_batch_size or args.per_device_train_batch_size
        reference = np.zeros((len(table), 2), dtype=np.float32)
        logger.info(f"The reference's log-probabilities of {len(table)} rows are made.")
        for start in range(0, len(table), size * group.world):
            indices = range(start + size * group.ranks.rank, len(table))[:size]
            batch = self.data_collator([table[i] for i in indices or range(1)])
            values = self._reference_logps(self._prepare_inputs(batch))  # type: ignore[attr-defined]
            rows = torch.stack(values, 1).tolist() if indices else []
            every = [row for shard in group.all_gather_object(rows) for row in shard]
            reference[start : start + len(every)] = every
        return reference

    def _reference_logps(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the two columns of reference values of one batch."""
        collected: list[torch.Tensor] = []
        inputs = {name: value for name, value in inputs.items() if name != ROW}
        inherited = super().compute_ref_log_probs  # type: ignore[misc]

        def keep(model: Any) -> torch.Tensor:
            first, second = inherited(model, inputs)
            collected.extend((first, torch.zeros_like(first) if second is None else second))
            return first.sum()

        if self._reference_model is not None:
            with torch.no_grad():
                keep(self._reference_model.to(self.args.device))
        else:
            off = self.model.disable_adapter() if self._without_adapter else nullcontext()
            with forward_only(self.model), off:
                self._call(self.model, self._parts(inputs), keep)
        return [values.detach().cpu() for values in collected]

    def _with_reference(self, inputs: dict[str, Any]) -> dict[str, Any]:
        rows = inputs.pop(ROW, None)
        if rows is None:
            if not self._without_adapter and self._reference_model is None:
                raise DataError(
                    "this dataset has no rows by which the reference's log-probabilities are "
                    "stored; give a Dataset, not an IterableDataset, or train an adapter "
                    "(peft_config)"
                )
            values = self._reference_logps(inputs)
        else:
            number = int(np.searchsorted(self._starts, int(rows[0]), side="right")) - 1
            table = self._reference_of(number)
            values = list(torch.from_numpy(table[rows.cpu().numpy() - self._starts[number]]).T)
        device = inputs["input_ids"].device
        return inputs | {n: v.to(device) for n, v in zip(self.COLUMNS, values, strict=True)}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        whole = self._with_reference(dict(inputs))
        inherited = super(LohanMixin, self).compute_loss  # type: ignore[misc]
        parts = self._parts(whole)
        out = self._call(model, parts, lambda stand_in: inherited(stand_in, whole))
        loss = self._auxiliary(out)
        metrics = self._metrics["train" if self.model.training else "eval"]  # type: ignore[attr-defined]
        if self._routes and getattr(out, "aux_loss", None) is not None:
            metrics["aux_loss"][-1] = out.aux_loss.item()
        if not return_outputs:
            return loss
        with torch.no_grad():
            plain = {name: value for name, value in parts[0].items() if name != "labels"}
            return loss, model(**plain, use_cache=False)


def _has_no_rows(named: Mapping[str, Any]) -> bool:
    """Return whether a dataset is an IterableDataset, whose rows cannot be numbered."""
    datasets = [named.get("train_dataset"), named.get("eval_dataset")]
    every = [d for one in datasets for d in (one.values() if isinstance(one, dict) else [one])]
    return any(isinstance(dataset, IterableDataset) for dataset in every)


def _copied(model: Any) -> nn.Module | None:
    """Return a copy of the model to use as its reference, or None if it is not in memory."""
    if not isinstance(model, nn.Module) or any(lacks_values(p) for p in model.parameters()):
        return None
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    logger.warning(
        f"The reference's log-probabilities of an IterableDataset cannot be computed before the "
        f"first step, so a copy of the model is kept in memory: {format_bytes(size)} in addition "
        "to LoHan's budget. To avoid it, give a Dataset, or train an adapter (peft_config)"
    )
    return deepcopy(model)


def _with_rows(collate: Callable[[list[Any]], dict[str, Any]]) -> Callable[[list[Any]], Any]:
    """Wrap a collator so that its batches also contain the row numbers of the examples."""

    def collated(examples: list[dict[str, Any]]) -> dict[str, Any]:
        rows = [example[ROW] for example in examples if ROW in example]
        batch = collate([{k: v for k, v in one.items() if k != ROW} for one in examples])
        return {**batch, ROW: torch.tensor(rows)} if rows else batch

    return collated


def _labels(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `ids` with IGNORED for the first token of each row and where `mask` is 0.

    The first token is ignored because no logits predict it.
    """
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, 0] = IGNORED
    return labels


class DPOTrainer(WithReference, TheirDPO):
    """TRL's DPOTrainer with all of its losses."""

    COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
    TOKENS = ("prompt_ids", "chosen_ids", "rejected_ids")

    def _parts(self, inputs: Mapping[str, Any]) -> list[Part]:
        other = (*self.COLUMNS, "completion_mask", ROW)
        part = {name: value for name, value in inputs.items() if name not in other}
        return [part | {"labels": _labels(inputs["input_ids"], inputs["completion_mask"])}]


class KTOTrainer(WithReference, TheirKTO):
    """TRL's KTOTrainer; mismatched answers run with the others in one pass over the weights."""

    COLUMNS = ("ref_logps", "ref_KL_logps")
    TOKENS = ("prompt_ids", "completion_ids", "KL_completion_ids")

    def _parts(self, inputs: Mapping[str, Any]) -> list[Part]:
        return [
            {
                "input_ids": inputs[f"{kind}input_ids"],
                "attention_mask": inputs[f"{kind}attention_mask"],
                "labels": _labels(inputs[f"{kind}input_ids"], inputs[f"{kind}completion_mask"]),
            }
            for kind in ("", "KL_")
            if f"{kind}input_ids" in inputs
        ]


# -- reward models ---------------------------------------------------------------------------------


class RewardTrainer(LohanMixin, TheirReward):
    """TRL's RewardTrainer."""


# -- supervised fine-tuning ------------------------------------------------------------------------


ROWS = 64  # tokens per slice when metrics are computed
Theirs = trl.SFTTrainer  # saved at import: scripts may replace trl.SFTTrainer with LoHan's


def _weighted_by_probability(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute TRL's "dft" loss, which weights each token by its probability."""
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return (losses * (-losses).exp().detach()).sum()


class Sums:
    """The number of tokens in a batch, and sums of their entropies and of correct predictions.

    This is separate from the trainer, so that a session does not keep the trainer alive.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        for part, right in zip(logits.split(ROWS), labels.split(ROWS), strict=True):
            logs = part.float().log_softmax(-1)
            entropy = -(logs.exp() * logs).sum().item()
            hits = (logs.argmax(-1) == right).sum().item()
            self.sums += torch.tensor([len(right), entropy, hits], dtype=torch.float64)


class SFTTrainer(LohanMixin, Theirs):
    """TRL's SFTTrainer with LoHan's sliced head.

    Datasets, templates, packing, adapters and metrics are TRL's. TRL's own tiled head is not used,
    because it reads the head's weights outside a model call, when they are not in memory.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        vars(base_of(self.model)).pop("forward", None)  # TRL's head
        self._token_metrics = Sums()

    def attach(self, inputs: Mapping[str, Any], *, lasting: bool = True) -> Session:
        session = super().attach(inputs, lasting=lasting)
        if session.head is not None:
            session.head.on_logits = self._token_metrics
            if self.args.loss_type == "dft":
                session.head.slice_loss = _weighted_by_probability
        return session

    def _undo_of_batch(self) -> Callable[[], None] | None:
        if type(self).compute_loss is not SFTTrainer.compute_loss or self.compute_loss_func:
            return None
        before = deepcopy(self._metrics), self._total_train_tokens

        def undo() -> None:
            self._metrics, self._total_train_tokens = before

        return undo

    def _of_all(self, sums: list[float]) -> list[float]:
        """Return the sums of values over all processes, as TRL computes them for its metrics."""
        if self.args.world_size == 1:
            return sums
        local = torch.tensor(sums, dtype=torch.float64, device=self.args.device)
        added: list[float] = self.accelerator.reduce(local, "sum").tolist()
        return added

    def _too_much(self, auxiliary: torch.Tensor) -> torch.Tensor:
        """Return the part of the auxiliary loss that exceeds TRL's.

        The model adds the auxiliary loss of every batch; TRL adds the mean over the batches
        of a step.
        """
        assert self.session is not None
        part = self.router_aux_loss_coef * auxiliary
        part = part * (1 - 1 / self.current_gradient_accumulation_steps)
        value, scale = part.detach(), self.session.executor.record.train_state.loss_scale
        return value + scale * (part - value)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs["use_cache"] = False
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        metrics = self._metrics["train" if self.model.training else "eval"]
        if self.model.training:
            mask = inputs.get("attention_mask")
            counted = mask.sum() if mask is not None else inputs["input_ids"].numel()
            (tokens,) = self._of_all([int(counted)])
            self._total_train_tokens += int(tokens)
        metrics["num_tokens"] = [self._total_train_tokens]
        self._token_metrics.sums.zero_()
        labels = inputs.get("labels")
        count = {"num_items_in_batch": num_items_in_batch}
        result = super(Theirs, self).compute_loss(model, dict(inputs), return_outputs=True, **count)
        loss, outputs = loss_of_all_ranks(self, result, count)
        # If the head computed all logits at once, it did not call `_token_metrics`.
        if not self._token_metrics.sums[0] and labels is not None:
            following = labels[:, 1:].reshape(-1)
            learnt = following != IGNORED
            logits = outputs.logits.detach()[:, :-1].flatten(0, 1)
            self._token_metrics(logits[learnt], following[learnt])
        tokens, entropy, hits = self._of_all(self._token_metrics.sums.tolist())
        if tokens:
            metrics["entropy"].append(entropy / tokens)
            metrics["mean_token_accuracy"].append(hits / tokens)
        if self.aux_loss_enabled:
            metrics["aux_loss"].append(outputs.aux_loss.item())
            if num_items_in_batch is not None:
                loss = loss - self._too_much(outputs.aux_loss)
        return (loss, outputs) if return_outputs else loss
