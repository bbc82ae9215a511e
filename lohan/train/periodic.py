"""Work between steps: evaluation, the best model, early stopping, samples, and checks of the loss.

All of it is derived from the step and the run's logs, so a run that was killed continues with the
same evaluations, the same best loss and the same counts. Each piece of work is logged when it is
done. Work that is due but not in the log is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lohan.checkpoint.train_state import SMALLEST_SCALE, TrainState
from lohan.config import Config
from lohan.data.text import chosen_template
from lohan.engine.export import export_session
from lohan.engine.session import Session
from lohan.errors import TrainingError
from lohan.train.evaluation import History, evaluate
from lohan.train.generation import Sampling, generate
from lohan.train.inputs import Inputs, Prompts, bytes_between_steps
from lohan.train.logs import Logger, Meter
from lohan.train.model_card import model_card
from lohan.train.run_folder import (
    RunFolder,
    append_row,
    eval_rows,
    export_mark,
    read_rows,
    users_umask,
)
from lohan.train.task import Batch, Share
from lohan.util.display import Display
from lohan.util.units import counted


class PeriodicTasks:
    """The tasks that run after every step, and once when a run starts or resumes."""

    def __init__(
        self,
        session: Session,
        folder: RunFolder,
        config: Config,
        inputs: Inputs,
        *,
        meter: Meter,
        display: Display,
        loggers: Sequence[Logger],
        stop: Callable[[], bool],
        catch_up: Callable[[], None],
    ) -> None:
        self._session, self._folder, self._config, self._inputs = session, folder, config, inputs
        group = session.process_group
        self._first = group.ranks.first
        self._meter, self._display, self._loggers, self._stop = meter, display, loggers, stop
        self._catch_up = catch_up  # commits every finished step and logs it
        self._history = History.of(group.broadcast_made(lambda: eval_rows(folder)))
        sampled = group.broadcast_made(lambda: [r["step"] for r in read_rows(folder.samples_file)])
        self._sampled = set(sampled)
        epoch = inputs.train_examples.steps_for(1.0, config.train.batch)
        self._eval_every = config.eval.every or epoch
        self._sample_every = config.sample.every or epoch
        if self.stopped:
            display.note(f"the run has stopped early: {self._no_better()}")

    @property
    def stopped(self) -> bool:
        """True if the loss has not improved for `early_stop` evaluations."""
        limit = self._config.eval.early_stop
        return limit > 0 and self._history.since_best >= limit

    def run_due(self) -> None:
        step, inputs = self._session.step, self._inputs
        if inputs.held_out is not None and self._due(step, self._eval_every, self._history.steps):
            self._evaluate(step)
        if inputs.prompts is not None and self._due(step, self._sample_every, self._sampled):
            self._sample(step, inputs.prompts)

    def _due(self, step: int, every: int, done: set[int] | frozenset[int]) -> bool:
        if step == 0 or step in done or self._stop():
            return False
        return step % every == 0 or step >= self._inputs.total or self.stopped

    # -- Evaluation --------------------------------------------------------------------------------

    def _evaluate(self, step: int) -> None:
        held = self._inputs.held_out
        assert held is not None
        self._catch_up()
        with self._meter.aside():
            result = evaluate(
                self._session.model,
                held,
                batch=self._config.train.batch,
                stop=self._stop,
                task=self._inputs.task,
                loss_of=self._loss,
                progress=lambda done, total: self._display.advance("evaluating", done, total),
            )
        if result is None:  # The evaluation was interrupted, and is repeated when the run resumes.
            return
        better = self._history.improves(result.loss)
        if better and self._config.output.export_best:
            self._export_best()
        row = result.to_row(step)
        if self._first:
            append_row(self._folder.metrics_file, row)
        self._history = self._history.with_row(row)
        for logger in self._loggers:
            logger.log(row)
        best = f"best {self._history.best:.4f} after step {self._history.best_step}"
        verdict = "best so far" if better else best
        self._display.note(f"evaluation after step {step}: {result} ({verdict})")
        if self.stopped:
            self._display.note(f"stopping early after step {step}: {self._no_better()}")

    def _loss(self, batch: Batch) -> float:
        return Share(self._session, self._inputs.task).loss(batch)[1]()

    def _no_better(self) -> str:
        history = self._history
        return (
            f"{counted(history.since_best, 'evaluation')} in a row without a loss below "
            f"{history.best:.4f} of step {history.best_step}"
        )

    def _export_best(self) -> None:
        """Export the best model before its evaluation is logged, so a logged best model exists."""
        self._session.commit()
        mark = export_mark(self._folder, self._config) if self._first else None
        with self._meter.aside(), users_umask():
            export_session(
                self._session,
                self._folder.best,
                source_folder=self._config.model,
                mark=mark,
                dtype=self._config.output.export_dtype,
                overwrite=True,
                chat_template=chosen_template(self._config.train.chat_template),
                card=model_card(self._folder, self._config, step=self._session.step),
                progress=lambda done, total: self._display.advance("exporting", done, total),
            )

    # -- Samples -----------------------------------------------------------------------------------

    def _sample(self, step: int, prompts: Prompts) -> None:
        sampling = Sampling(max_new_tokens=self._config.sample.tokens)
        batch_size = max(1, bytes_between_steps(self._session.plan) // prompts.each_bytes)
        answers: list[str] = []
        self._catch_up()
        with self._meter.aside():
            for start in range(0, len(prompts.ids), batch_size):
                some = prompts.ids[start : start + batch_size]
                answers += generate(self._session.model, prompts.encoder, some, sampling)
        pairs = [
            {"prompt": prompt, "text": text}
            for prompt, text in zip(prompts.texts, answers, strict=True)
        ]
        if self._first:
            append_row(self._folder.samples_file, {"step": step, "samples": pairs})
        self._sampled.add(step)
        for pair in pairs:
            self._display.note(f"sample after step {step}: {pair['prompt']}\n  {pair['text']}")


# -- Implausible losses and gradient norms: the run stops before the step is committed -------------


LARGEST_LOSS = 1e15  # far beyond any loss or gradient norm that allows training


def check_loss(loss: float, state: TrainState) -> None:
    """Raise TrainingError if the loss of an uncommitted step is implausible.

    A loss of exactly zero is possible on memorised data, but not in the first step.
    """
    if not math.isfinite(loss) or abs(loss) > LARGEST_LOSS:
        raise _stopped("loss", loss, state.step)
    if loss == 0.0 and state.step == 0:
        raise _stopped("loss", loss, 0)


def check_norm(norm: float | None, before: TrainState, after: TrainState) -> None:
    """Raise TrainingError if the gradient norm is implausible, after backward.

    An fp16 overflow skips its step and halves the loss scale. It stops the run only if the scale is
    already the smallest.
    """
    if after.skipped_steps > before.skipped_steps:
        if before.loss_scale <= SMALLEST_SCALE:
            raise _stopped(
                f"gradient norm with loss scale {before.loss_scale:g}", norm, before.step
            )
        return
    if norm is None:
        return
    if not math.isfinite(norm) or norm > LARGEST_LOSS or (norm == 0.0 and before.step == 0):
        raise _stopped("gradient norm", norm, before.step)


def _stopped(what: str, value: float | None, done: int) -> TrainingError:
    state = f"step {done} is committed and complete" if done else "no step was committed"
    return TrainingError(
        f"step {done + 1}: the {what} is {value}, which is not plausible; the run stops before "
        f"this step is committed or exported ({state}). Lower --lr, check the data, or compare the "
        "first steps with plain PyTorch: `lohan verify`"
    )
