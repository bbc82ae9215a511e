"""What the commits of a run record besides weights and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lohan.checkpoint.train_state import ChangedBuffers, TrainState
from lohan.device.base import Device
from lohan.engine.buffers import StepScalars
from lohan.model.plan import Plan
from lohan.param_groups import META_KEY, HyperParameters
from lohan.store.store import Store


class RunRecord:
    """The counters and the hyper-parameters of a run, and the metadata of each step."""

    # The number of ranks over whose losses gradients are averaged; 1 if they are summed.
    mean_over = 1

    def __init__(
        self, model: nn.Module, plan: Plan, *, store: Store, device: Device, groups: HyperParameters
    ) -> None:
        self._store, self._device, self._scales_loss = store, device, plan.dtype == "fp16"
        self.groups = groups
        self.train_state = TrainState.of(store.meta)
        self.buffers = ChangedBuffers(model, store.meta)  # the buffers on the compute device
        # Returns further metadata. It is called at the end of every backward that is a step.
        self.extra_meta: Callable[[], dict[str, Any]] = dict

    @property
    def unscale_divisor(self) -> float:
        """The number that divides gradients before clipping: loss scale times averaged ranks."""
        return self.train_state.loss_scale * self.mean_over

    def scalars(self, clip_factor: float) -> StepScalars:
        """Return the numbers for the updates of the current step."""
        return StepScalars(
            groups=self.groups.at(self.train_state.step),
            update=self.train_state.updates + 1,
            grad_multiplier=clip_factor / self.unscale_divisor,
            missed_updates=self.train_state.missed_updates,
        )

    def advance(self, scalars: StepScalars | None, *, absent: Sequence[str]) -> dict[str, Any]:
        """Advance the counters by one step, and return the metadata for its commit.

        `scalars` is None if the step changes no weight. `absent` names the parameters without a
        gradient.
        """
        committed, recorded = self._store.meta, dict[str, Any]()
        if scalars is None:
            self.train_state = self.train_state.overflowed()
        else:
            self.train_state = self.train_state.updated(scaled=self._scales_loss, absent=absent)
            recorded = {META_KEY: self.groups.to_json(scalars.groups)}
        return {
            **committed,
            **recorded,
            **self.train_state.to_meta(self._device.random_state()),
            **self.buffers.to_meta(),
            **self.extra_meta(),
        }

    def restore(self) -> None:
        """Return to the counters of the last committed step."""
        self.train_state = TrainState.of(self._store.meta)
