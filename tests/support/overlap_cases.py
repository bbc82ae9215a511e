"""Trainings whose result must not depend on overlap, update mode or delays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

from lohan.device.accelerator import AcceleratorDevice
from tests.support.delayed_runs import Result, Tuning, data, net, train, tuned

STEPS = 4
CLIP = 0.3  # below the norm of the first steps here, above that of later ones
KINDS = ["plain", "tied", "several"]
PLAIN = Tuning(window=0, slots=0, ring=1, spilled=0.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is computed; a `Tuning` and a mode say when."""

    kind: str = "plain"
    clip: float = 0.0
    dtype: torch.dtype = torch.float32
    micro_batch: int | None = None
    dropout: float = 0.0
    skip: tuple[tuple[int, int], ...] = ()  # (step, block left out)
    still: tuple[tuple[int, int], ...] = ()  # (step, block that gets no gradient)
    overflow: int = -1  # step whose loss leaves the range of fp16
    evaluated: bool = False

    def run(self, place: Path, tuning: Tuning, **options: object) -> Result:
        with pytest.MonkeyPatch.context() as patch:
            tuned(patch, tuning)
            model = net(self.kind, dtype=self.dtype, dropout=self.dropout)
            batches = data(
                STEPS,
                kind=self.kind,
                dtype=self.dtype,
                skip=dict(self.skip),
                still=dict(self.still),
            )
            return train(
                model,
                batches,
                place,
                clip=self.clip,
                micro_batch=self.micro_batch,
                scale=lambda step: 1e9 if step == self.overflow else 1.0,
                between=evaluate(batches) if self.evaluated else lambda *_: None,
                **options,
            )


@functools.cache
def plain(case: Case) -> Result:
    """Run the specification: no overlap, everything on SSD, one buffer of each kind."""
    with TemporaryDirectory() as place:
        return case.run(Path(place), PLAIN, overlap=False, update_mode="serial")


def check_norm_of_device(
    device: AcceleratorDevice,
    doubles: bool,
    tuning: Tuning,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the host reads no gradient to compute the norm.

    If the device has no double precision, the host computes it, with the bits of the CPU.
    """
    case = Case(kind="tied", clip=CLIP)
    wanted = plain(case)
    assert device._has_fp64
    device._has_fp64 = doubles
    read = list[int]()
    if doubles:
        monkeypatch.setattr("lohan.engine.gradients._core.sum_squares", read.append)
    result = case.run(place, tuning, update_mode="balanced", device=device)
    assert not read
    result.check_there(wanted) if doubles else result.check(wanted)


def check(case: Case, place: Path, tuning: Tuning, *, mode: str, **options: object) -> None:
    wanted = plain(replace(case, evaluated=False))
    result = case.run(place, tuning, update_mode=mode, **options)
    if result.norms[0] is None:  # only what holds gradients takes their norm
        assert not case.clip and mode != "serial" and case.dtype != torch.float16
        wanted = replace(wanted, norms=result.norms)
    result.check(wanted)


def evaluate(batches: list[dict[str, torch.Tensor]]) -> Callable[[nn.Module, int], None]:
    """Before each step: nothing, all of the model, all of it twice, or two blocks only."""

    def between(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            for _ in range((0, 1, 2, 0)[step]):
                model(**batches[step])
            if step == 3 and hasattr(model, "blocks"):
                model.blocks[1](model.entry(batches[0]["x"]))

    return between
