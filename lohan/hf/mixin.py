"""The part of a transformers Trainer that LoHan replaces: optimizer, steps and checkpoints."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.trainer import (
    SCHEDULER_NAME,
    TRAINING_ARGS_NAME,
    GreedyLR,
)
from transformers.utils import logging

from lohan.capture.placeholders import StepGradients, lacks_values
from lohan.checkpoint.adapters import base_of
from lohan.device.ranks import ProcessGroup
from lohan.engine.attach import attach
from lohan.engine.head import find_decoder
from lohan.engine.session import Session
from lohan.engine.stored_weights import has_saving_code, save_into, stored_weights_of
from lohan.engine.user_code import has_gradient_hooks
from lohan.errors import BudgetError, ConfigError, DataError, ModelError
from lohan.hf.arguments import (
    LohanArguments,
    check_arguments,
    check_push,
    moments_of,
    optimizer_name,
)
from lohan.hf.optimizers import TorchGroups, check_class, class_and_kwargs, unwrapped
from lohan.hf.resumption import GROUPS_FILE, Resumption
from lohan.hf.stores import (
    OUTPUT_DIR,
    TRAINING,
    OutputStore,
)
from lohan.hf.user_steps import UserSteps, is_of_library
from lohan.optim import AdamW
from lohan.store.admin import find_snapshot, remove, snapshot
from lohan.store.files import NoRoomError
from lohan.train.run_folder import write_file

logger = logging.get_logger(__name__)


class TooLarge(RuntimeError):
    """Raised for a batch that exceeds the budget; auto_find_batch_size recognises its message."""


def _step_gradients(trainer: LohanMixin | None) -> StepGradients | None:
    """Return the gradients of the step that a Trainer's session runs, or None without a session."""
    session = None if trainer is None else trainer.session
    return None if session is None or session.closed else session.executor.step_gradients


class LohanMixin(OutputStore):
    """The part of a Trainer that trains out of core.

    `session` is None until the first training step attaches the model.
    """

    over_tokens = False  # whether the loss is computed from log-probabilities of tokens
    accelerator: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    lr_scheduler: Any
    state: Any
    model_init: Any
    compute_loss_func: Any
    label_smoother: Any
    model_accepts_loss_kwargs: bool

    def __init__(self, *positional: Any, lohan: LohanArguments | None = None, **named: Any) -> None:
        self.lohan = lohan or LohanArguments()
        self.session: Session | None = None
        self._waiting: list[dict[str, Any]] = []  # batches of the current step
        self._accumulated = 0  # gradient_accumulation_steps when training began
        self._resumption = Resumption(self)
        self._keeps_session = True  # whether the session is kept after an evaluation
        self._too_large: BudgetError | None = None
        self._ranks: ProcessGroup | None = None  # the processes of torchrun
        self._groups: TorchGroups | None = None  # created on first use
        self._user_steps = UserSteps(self)
        args = positional[1] if len(positional) > 1 else named.get("args")
        if args is not None:
            check_arguments(args)
            if args.push_to_hub:
                check_push(args, self.lohan.budget(args.output_dir).ssd)
        super().__init__(*positional, **named)
        check_arguments(self.args)  # Trainer creates default arguments if there are none.
        _check_optimizer(self)

    # -- set-up -----------------------------------------------------------------------------------

    def _build_accelerator_args(self, **named: Any) -> dict[str, Any]:
        """Return the arguments of the accelerator, without autocast.

        In LoHan, bf16 and fp16 are the types of the weights, which have an fp32 master copy.
        """
        arguments: dict[str, Any] = super()._build_accelerator_args(**named)  # type: ignore[misc]
        return {**arguments, "mixed_precision": "no"}

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator that neither moves nor wraps the model.

        Batches are moved to the device as usual.
        """
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = self.accelerator

        def prepare_model(model: Any, *_: Any, **__: Any) -> Any:
            if not any(prepared is model for prepared in accelerator._models):
                accelerator._models.append(model)
            return model

        accelerator.prepare_model = prepare_model
        accelerator.backward = self._user_steps.wrapped(accelerator.backward)

    def push_to_hub(self, *args: Any, **named: Any) -> Any:
        check_push(self.args, self.lohan.budget(self.args.output_dir).ssd)
        return super().push_to_hub(*args, **named)  # type: ignore[misc]

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Do nothing: weights are streamed from the store to the device, block by block."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer as transformers does; only its parameter groups are used."""
        super().create_optimizer(model)  # type: ignore[misc]
        check_class(type(unwrapped(self.optimizer)))
        self._user_steps.watch(unwrapped(self.optimizer))
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    # This refuses a name in `args.optim` that LoHan has no kernel for.
    get_optimizer_cls_and_kwargs = staticmethod(class_and_kwargs)

    def attach(self, inputs: Mapping[str, Any], *, lasting: bool = True) -> Session:
        """Return the open session. If there is none, attach the model.

        The model is attached with a plan for batches shaped like `inputs`. A session that is not
        `lasting` serves one evaluation; its store is separate and is removed afterwards.
        """
        if self.session is not None and not self.session.closed:
            if self.session.model is not self.model:
                raise ConfigError(
                    f"trainer.model was replaced by another {type(self.model).__name__}, but the "
                    "session of this Trainer trains the earlier one; make a new Trainer for it"
                )
            if self.optimizer is not None:
                _param_groups(self)
            return self.session
        name = self._store_name() if lasting else f"lohan-evaluation-{uuid4().hex[:12]}"
        args, moments = self.args, moments_of(self.args, self.lohan.moments)
        groups = _param_groups(self) if lasting else None
        longest = self.lohan.max_length or getattr(args, "max_length", 0)
        if self._resumption.active:
            # Plan for the same shapes as before, because slices affect the result.
            shapes = shapes_from_json(self._stored()["shapes"])
            self._resumption.rewind()
        else:
            shapes = shapes_for(inputs, longest)
            if self._sharing():
                assert self._ranks is not None
                all_shapes = self._ranks.all_gather_object(shapes_to_json(shapes))
                shapes = shapes_from_json(largest_shapes(all_shapes))
            if lasting:
                name = self._new_store()
        try:
            self.session = attach(
                self.model,
                budget=self.lohan.budget(args.output_dir),
                resume=self._resumption.active,
                store_name=name,
                optimizer=AdamW(moments=moments) if groups is None else groups.optimizer,
                param_groups=() if groups is None else groups,
                batch=shapes,
                clip=args.max_grad_norm,
                micro_batch=self.lohan.micro_batch,
                tiles=self.lohan.tiles,
                meta={
                    "shapes": shapes_to_json(shapes),
                    OUTPUT_DIR: str(self._out.resolve()),
                    TRAINING: uuid4().hex,
                },
                overlap=self.lohan.overlap,
                update_mode=self.lohan.update_mode,
                activations=self.lohan.activations,
                run_again=self._undo_of_batch() is not None,
                dtype="bf16" if args.bf16 else "fp16" if args.fp16 else None,
                device="cpu" if args.device.type == "cpu" else "accelerator",
                compile=args.torch_compile_backend or True if args.torch_compile else False,
                **self._sharing(),
            )
        except BudgetError as error:
            if not args.auto_find_batch_size:
                raise
            self._too_large = error
            raise TooLarge(f"{error}: this batch is out of memory.") from None
        self._user_steps.attached(self.session)
        if self._ranks is not None and not _sums_over_ranks(self):  # average over ranks, as DDP
            self.session.executor.record.mean_over = self._ranks.world
            if self.session.head is not None:
                self.session.head.ranks_apart = True
        if lasting:
            self._keep_open(self.session)
        return self.session

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        return loss_of_all_ranks(self, super().compute_loss(*args, **named), named)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """Evaluate, and then close a session that was attached only for this evaluation.

        The temporary store of such a session is removed.
        """
        before = self.session
        held = _parameters(self.model) if before is None else []
        try:
            return super().evaluation_loop(*args, **named)  # type: ignore[misc]
        finally:
            if before is None and self.session is not None and not self._keeps_session:
                session, self.session, self._keeps_session = self.session, None, True
                dirs = session.store.dirs
                session.close(flush=False)
                remove(dirs)
                for module, name, parameter in held:
                    module._parameters[name] = parameter

    # -- steps ------------------------------------------------------------------------------------

    def train(self, *args: Any, **named: Any) -> Any:
        """Train as transformers does.

        A second call continues with the same weights and optimizer state and starts a new
        schedule; with model_init, it starts with a new model. After the call has returned,
        backward over the model computes ordinary gradients and updates nothing.
        """
        self._waiting = []
        if self.model_init is not None and self.session is not None:
            dirs = self.session.store.dirs
            self.session.close(flush=False)
            remove(dirs)
            self.session = None
        self._resumption = Resumption(self)
        if self.session is None:
            self._replacing = None
        checkpoint = named.pop("resume_from_checkpoint", None) if not args else args[0]
        with TemporaryDirectory(prefix="lohan-") as work:
            if checkpoint is True:
                checkpoint = self._resumption.last_checkpoint(Path(work))
            if self.session is not None and not self.session.closed:
                self.session.updates_in_backward = True
                self._user_steps.attached(self.session)
            try:
                output = super().train(checkpoint, *args[1:], **named)  # type: ignore[misc]
            except RuntimeError:
                if self._too_large is None:
                    raise
                raise self._too_large from None
            finally:
                self._user_steps.end()
                if self.session is not None and not self.session.closed:
                    self.session.updates_in_backward = False
        if self.session is not None:
            self.session.commit()
        return output

    def get_batch_samples(self, *args: Any, **named: Any) -> Any:
        """Return the batches of one optimizer step.

        If a subclass overrides training_step, the model is attached here, because that
        method does not attach it.
        """
        asked = self.args.gradient_accumulation_steps
        if asked != self._accumulated:
            raise ConfigError(
                f"gradient_accumulation_steps is {asked}, and was {self._accumulated} when the "
                "training began: Trainer would begin steps in the middle of others; set it before "
                "train(), or vary the batches themselves"
            )
        batches, count = super().get_batch_samples(*args, **named)  # type: ignore[misc]
        self._user_steps.prepare(batches)
        return batches, count

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Collect the batches of one optimizer step and run them with the last one.

        If the loss is a sum over tokens, the batches are joined into one. Every block divides it
        into micro-batches, so weights are transferred only once per step. Otherwise the batches run
        one by one and their gradients are added.
        """
        self._waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        parts, self._waiting = self._waiting, []
        joined = self._joined_batch(parts) if num_items_in_batch is not None else None
        batches = parts if joined is None else [joined]
        session = self.attach(batches[0])
        before, loss = session.step, torch.zeros((), device=self.args.device)
        device, undo = session.executor.device, self._undo_of_batch()
        drawn = device.random_state()
        with self._user_steps.own_step(session), self._user_steps.losses_in_fp32(model):
            with session.accumulate() if len(batches) > 1 else nullcontext():
                for batch in batches:
                    loss += super().training_step(model, batch, num_items_in_batch)  # type: ignore[misc]
            if session.must_run_again:
                device.set_random_state(drawn)
                assert undo is not None
                undo()
                loss = super().training_step(model, batches[0], num_items_in_batch)  # type: ignore[misc]
        if session.step != before + 1:
            raise ModelError(
                f"{type(self.model).__name__}: backward has reached no parameter that learns, so "
                f"step {before + 1} would change nothing; check how the loss is computed, and "
                "which parameters have requires_grad"
            )
        self._take_place(session)
        _replan(session)
        return loss

    def _undo_of_batch(self) -> Callable[[], None] | None:
        """Return a function that undoes what running a batch changes, or None.

        The result is None if a batch cannot run twice, because its loss has side effects other than
        gradients and the state that the function restores.
        """
        library_method = super().compute_loss.__func__  # type: ignore[misc]
        repeatable = (
            type(self).compute_loss is LohanMixin.compute_loss
            and library_method is transformers.Trainer.compute_loss
            and not self.compute_loss_func
            and not self._user_steps.overridden
        )
        return (lambda: None) if repeatable else None

    def _joined_batch(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the batches joined into one, or None if they must run one by one.

        This is the case if the loss of the joined batch would not be the sum of the losses, if
        gradient hooks have to run for each batch, or if the batches cannot be padded to one shape.
        """
        if len(parts) == 1:
            return dict(parts[0])
        base: Any = base_of(self.model)
        summed = (
            is_of_library(type(self).compute_loss)
            and self.compute_loss_func is None
            and find_decoder(base) is not None
        )
        if not summed or getattr(base.config, "output_router_logits", False):
            return None
        if has_gradient_hooks(self.model):  # PyTorch calls them once per batch
            return None
        try:
            return merged(parts)
        except DataError:  # shapes that cannot be padded
            return None

    def _clip_grad_norm(self, model: Any) -> float | None:
        self._user_steps.norm_is_read = True
        return self.session.grad_norm if self.session is not None else None

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float | None:
        limit = self.args.max_grad_norm or 0.0
        if self.session is not None and limit != self.session.plan.clip:
            raise ConfigError(
                f"max_grad_norm is {limit}, and was {self.session.plan.clip} when the training "
                "began: gradients are clipped inside backward, by the plan that was made then; set "
                "it before the Trainer is made"
            )
        if limit and not self._user_steps.norm_is_read:
            raise ConfigError(
                f"{type(self).__name__}._clip_grad_norm does not call super()._clip_grad_norm, but "
                f"gradients were clipped to max_grad_norm = {limit} inside backward; set "
                "max_grad_norm=0 for no clipping, or change gradients with register_hook"
            )
        self._user_steps.norm_is_read = False
        return grad_norm

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Run one evaluation batch.

        If metrics need logits, the model's own head and loss run over all tokens at once.
        """
        if self.session is None and (
            self.over_tokens or any(lacks_values(p) for p in self.model.parameters())
        ):
            self._keeps_session = bool(getattr(self, "is_in_train", False))
            self.attach(inputs, lasting=self._keeps_session)
        head = self.session.head if self.session is not None else None
        sliced = prediction_loss_only or head is None or self.over_tokens
        how = nullcontext() if sliced else head.whole()  # type: ignore[union-attr]
        if head is not None and sliced and not self.over_tokens:
            how = head.apart()  # Trainer gathers the losses of all processes
        # Trainer lists the items of an output whether it needs them or not.
        listed = head.only_loss() if head is not None and sliced else nullcontext()
        with how, listed, self._user_steps.losses_in_fp32(model):
            return super().prediction_step(  # type: ignore[misc]
                model, inputs, prediction_loss_only, ignore_keys
            )

    # -- checkpoints ------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; every process takes part, since each has a shard of the weights."""
        if self._ranks is not None and not self.args.should_save and stored_weights_of(self.model):
            self._save(output_dir)
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        stored = stored_weights_of(self.model)
        # A subclass has given the values, or the model has code of its own for saving.
        if stored is None or state_dict is not None or has_saving_code(self.model):
            return super()._save(output_dir, state_dict)  # type: ignore[misc]
        target = Path(output_dir or self.args.output_dir)
        logger.info(f"{target}: weights are written as {stored.dtype}, the type of the model")
        save_into(target, stored)
        if not self.args.should_save:
            return None
        collator = getattr(self, "data_collator", None)
        tokenizer = getattr(self, "processing_class", None) or getattr(collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(target)
        torch.save(self.args, target / TRAINING_ARGS_NAME)
        return None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Copy the state of this step into the checkpoint, so that training can resume from it."""
        if self.session is not None:
            _keep_state(self.session, self._state_folder(Path(output_dir)))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)
            saved = json.dumps(_param_groups(self).saved(), indent=1)
            write_file(Path(output_dir) / GROUPS_FILE, saved)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint.

        If checkpoints contain weights only, the state of the best one is kept separately,
        so that it can be restored at the end.
        """
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        if self.args.should_save:
            folder = f"checkpoint-{self.state.global_step}"
            self._name_training(Path(self._get_output_dir(trial)) / folder)  # type: ignore[attr-defined]
        args, best = self.args, self.state.best_global_step == self.state.global_step
        if args.save_only_model and args.load_best_model_at_end and best and self.session:
            _keep_state(self.session, self._state_folder(Path(args.output_dir)))

    def _load_best_model(self) -> None:
        """Restore the weights and the optimizer state of the best checkpoint."""
        best = Path(self.state.best_model_checkpoint)
        logger.info(f"Loading best model from {best} (score: {self.state.best_metric}).")
        if self.session is None:
            return
        alone = self.args.save_only_model
        state_folder = self._state_folder(Path(self.args.output_dir) if alone else best)
        self.session.rewind(find_snapshot(state_folder))
        if alone:
            remove([find_snapshot(state_folder)])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Choose the store and the state to continue from; the first batch opens the store."""
        if self.session is not None:
            self.session.close()
            self.session = None
        self._replacing = None
        self._resumption.begin(Path(resume_from_checkpoint).absolute())

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Resume after the last committed step, which may be later than the checkpoint."""
        self._accumulated = self.args.gradient_accumulation_steps
        begins = self._resumption.is_beginning(resume_from_checkpoint)
        checkpoint = None if begins else resume_from_checkpoint
        position: tuple[int, int] = super()._init_training_state(  # type: ignore[misc]
            max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial
        )
        if not self._resumption.active:
            if self.session is not None and not self.session.closed and self.session.step:
                first = self.session.step
                self.session.executor.record.extra_meta = lambda: {"first_step": first}
            return position
        self.state.global_step += self._resumption.count_beyond(self.state.global_step)
        epochs, steps = divmod(self.state.global_step, num_update_steps_per_epoch)
        skip = 0 if self.args.ignore_data_skip else steps * self.args.gradient_accumulation_steps
        return epochs, skip

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        _param_groups(self).restore(self._resumption.recorded_groups(Path(checkpoint)))
        if self._resumption.is_beginning(checkpoint):
            with self._user_steps.unchecked():
                self.optimizer.step()
        else:
            state = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
            self.lr_scheduler.load_state_dict(state)
        for group, rate in zip(
            self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate
        # ReduceLROnPlateau and GreedyLR step at evaluations.
        if not isinstance(self.lr_scheduler, (ReduceLROnPlateau, GreedyLR)):
            for _ in range(self._resumption.beyond):
                self.lr_scheduler.step()


def _check_optimizer(trainer: LohanMixin) -> None:
    """Refuse an optimizer that LoHan has no kernel for."""
    kind = type(trainer)
    if trainer.optimizer is not None:
        check_class(type(unwrapped(trainer.optimizer)))
    elif trainer.optimizer_cls_and_kwargs is not None:
        check_class(trainer.optimizer_cls_and_kwargs[0])
    elif (
        kind.create_optimizer is LohanMixin.create_optimizer
        and kind.get_optimizer_cls_and_kwargs is LohanMixin.get_optimizer_cls_and_kwargs
    ):
        optimizer_name(trainer.args)


def _param_groups(trainer: LohanMixin) -> TorchGroups:
    """Return the parameter groups of the optimizer, which is created if it does not exist."""
    if trainer._groups is None:
        trainer._groups = TorchGroups(moments_of(trainer.args, trainer.lohan.moments))
        # The session refers to the groups. It must not keep its Trainer alive, because deleting
        # the Trainer ends the session.
        reference = weakref.ref(trainer)
        trainer._groups.step_gradients = lambda: _step_gradients(reference())
    if trainer.optimizer is None:
        trainer.create_optimizer()
    if trainer.session is not None and not trainer.session.closed and trainer.session.step:
        trainer._groups.check_kept(trainer.optimizer)
    trainer._groups.take_over(trainer.optimizer, trainer.model)
    trainer._user_steps.watch(unwrapped(trainer.optimizer))
    session = trainer.session
    if session is not None and not session.closed:
        made_for, kind = session.plan.kind, trainer._groups.optimizer.kind
        if made_for != kind:
            raise ConfigError(
                f"the training began with {made_for}, the optimizer is now {kind}; go on with "
                "the same one, or start a new Trainer in another output_dir"
            )
    return trainer._groups


def _sums_over_ranks(trainer: LohanMixin) -> bool:
    """Return whether the sliced head computes the loss over the tokens of all processes.

    Otherwise each process takes the mean over its own tokens, as with DDP.
    """
    head = trainer.session.head if trainer.session is not None else None
    user_loss = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    counted = trainer.args.average_tokens_across_devices and trainer.model_accepts_loss_kwargs
    summed = trainer.over_tokens or counted
    of_library = is_of_library(type(trainer).compute_loss)
    return head is not None and not user_loss and summed and of_library


def loss_of_all_ranks(trainer: LohanMixin, result: Any, named: Mapping[str, Any]) -> Any:
    """Return the result of compute_loss with a loss that is correct for several processes.

    Trainer multiplies the loss by the number of processes, because DDP averages gradients. If
    the loss is already taken over the tokens of all processes, this undoes the multiplication.
    """
    args, session = trainer.args, trainer.session
    head = None if session is None else session.head
    if head is None or args.world_size == 1 or head.ranks_apart or head.runs_whole:
        return result
    if not args.average_tokens_across_devices or not named.get("num_items_in_batch"):
        return result
    loss, *outputs = result if isinstance(result, tuple) else (result,)
    loss = loss / trainer.accelerator.num_processes
    return (loss, *outputs) if outputs else loss


def _replan(session: Session) -> None:
    """Update the plan with the speeds and gradient norms measured so far, and log changes."""
    before, change = not session.plan.commit.every_step, session.replan()
    if not session.process_group.ranks.first:
        return
    if change is not None:
        logger.info(f"after step {session.step}: {change}")
    if not session.plan.commit.every_step and not before:
        logger.warning(
            f"LoHan commits every {session.plan.commit} from here on, and with every "
            "checkpoint: a crash costs the steps since the last commit; "
            "LohanArguments(commit_every='step') commits each"
        )


def _keep_state(session: Session, folder: Path) -> None:
    """Copy the state of the last step into a folder of a checkpoint, if there is room."""
    session.commit()
    try:
        snapshot(session.store, folder, with_fixed=False)
    except NoRoomError as error:
        logger.warning(
            f"{folder}: no room for a copy of the optimizer state ({error}); training can go on "
            "from here only as long as it is the last checkpoint; set save_total_limit, or "
            "save_only_model"
        )


def _parameters(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    return [(m, name, p) for m in model.modules() for name, p in m._parameters.items()]


# -- transformers' Trainer, out of core ------------------------------------------------------------


class Trainer(LohanMixin, transformers.Trainer):
    """A transformers.Trainer whose weights and optimizer state are in the store."""


# -- Joining batches, and the shapes to plan for ---------------------------------------------------


# The padding value of each input. Padded positions have no label, and since padding is on the
# right, no earlier token attends to them.
FILL = {
    "input_ids": 0,
    "attention_mask": 0,
    "labels": -100,
    "shift_labels": -100,
    "token_type_ids": 0,
    "position_ids": 0,
}


def merged(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several batches joined into one, with rows padded on the right to the longest."""
    if len(batches) == 1:
        return dict(batches[0])
    joined: dict[str, Any] = {}
    for name, first in batches[0].items():
        values = [batch.get(name) for batch in batches]
        if not isinstance(first, torch.Tensor) or first.ndim == 0:
            if any(value != first for value in values):
                raise _unequal(name, "values that are no tensors")
            joined[name] = first
            continue
        joined[name] = torch.cat(_filled(name, values))
    return joined


def _filled(name: str, tensors: Sequence[Any]) -> list[torch.Tensor]:
    if any(not isinstance(t, torch.Tensor) or t.ndim != tensors[0].ndim for t in tensors):
        raise _unequal(name, "different ranks")
    if len({t.shape[1:] for t in tensors}) == 1:
        return list(tensors)
    if name not in FILL or tensors[0].ndim != 2:
        raise _unequal(name, f"shapes {', '.join(str(list(t.shape)) for t in tensors)}")
    longest = max(t.shape[1] for t in tensors)
    return [
        torch.nn.functional.pad(t, (0, longest - t.shape[1]), value=FILL[name]) for t in tensors
    ]


def _unequal(name: str, what: str) -> DataError:
    return DataError(
        f"gradient accumulation: {name!r} has {what} in the batches of one step, so they cannot be "
        "joined; set gradient_accumulation_steps to 1 and raise per_device_train_batch_size"
    )


def shapes_for(inputs: Mapping[str, Any], max_length: int | None) -> dict[str, torch.Tensor]:
    """Return a batch as meta tensors, with rows of at least `max_length` tokens."""
    tensors = {n: t for n, t in inputs.items() if isinstance(t, torch.Tensor)}
    ids = tensors.get("input_ids")
    if ids is None or ids.ndim != 2:
        return tensors
    length = ids.shape[1]
    longest = max(length, max_length or 0)

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        longer = tensor.ndim >= 2 and tensor.shape[1] == length
        size = (tensor.shape[0], longest, *tensor.shape[2:]) if longer else tensor.shape
        return torch.empty(size, dtype=tensor.dtype, device="meta")

    return {name: shaped(t) for name, t in tensors.items() if t.ndim}


def largest_shapes(all_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the largest shape of each input in any process, given the shapes in all of them."""
    first = dict(all_ranks[0])
    for other in all_ranks[1:]:
        for name, (shape, dtype) in first.items():
            if name in other and len(other[name][0]) == len(shape):
                first[name] = [list(map(max, shape, other[name][0])), dtype]
    return first


def shapes_to_json(shapes: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in shapes.items()}


def shapes_from_json(data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (shape, dtype) in data.items()
    }
