"""Clipping without waiting for it: when updates run before the norm of all gradients is known.

Clipping and fp16 loss scaling need every gradient before the first update. While steps stay below
the limit, the factor of all of them turns out to be 1: so updates run in backward as if there were
no limit, into the generation that is not committed, and the norm is known when backward has ended.
Below the limit the step is committed. Above it nothing is lost but time: the generation under way
is forgotten, what is pinned in host memory is read again from the committed one, and the step is

* redone: updated once more with its factor from the gradients, where the plan holds those in memory
  anyway;
* run again: from the same batch and random state, with its factor known, where they would go to
  SSD. That takes a caller who does it where `must_run_again` says so, as `lohan train` does, and a
  model whose buffers a step leaves alone.

Every way gives the bits of waiting.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lohan.model.plan import Plan

RECENT = 8  # steps
MOST_CLIPPED = 2  # of the recent ones: more, and waiting costs less than going back


@dataclass(frozen=True)
class Factor:
    """What clipping multiplies the gradients of a step with, and the norm that it follows from."""

    clip_factor: float
    norm: float


class Speculation:
    """Decides, step by step, from what the last ones were like."""

    def __init__(self, plan: Plan, *, durable: bool) -> None:
        """`durable`: there is a committed generation to go back to."""
        self._possible = plan.speculates(durable=durable)
        self.holds_gradients = not plan.spilled  # in memory, until the norm is known
        self.known: Factor | None = None  # of the step that is to be run again
        self._clipped: deque[bool] = deque(maxlen=RECENT)
        self.counts: dict[str, int] = {}  # of the last step: speculated, redone

    def pays(self, *, repeatable: bool) -> bool:
        """For the backward that begins; `repeatable`: a step that is run again finds what it
        found."""
        if self.known is not None:
            return True
        able = self._possible and (self.holds_gradients or repeatable)
        calm = bool(self._clipped) and not self._clipped[-1]
        return able and calm and sum(self._clipped) <= MOST_CLIPPED

    @property
    def must_run_again(self) -> bool:
        """The last backward was that of a clipped step, and did not count."""
        return self.known is not None

    def saw(self, *, clipped: bool, speculated: bool) -> None:
        """How a step went; `clipped`: with another factor than 1, or with none."""
        self._clipped.append(clipped)
        if self._possible:
            self.counts = {"speculated": int(speculated), "redone": int(speculated and clipped)}

    def take_known(self) -> Factor | None:
        """The factor of the step that has now been run again, if it has."""
        known, self.known = self.known, None
        return known
