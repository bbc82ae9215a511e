"""What a Trainer out of core is told beyond transformers' own arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lohan.engine.attach import Budget


@dataclass(frozen=True, kw_only=True)
class LohanArguments:
    """What Trainer has no argument for: `Trainer(..., lohan=LohanArguments(host="8GiB"))`. What is
    not given comes from the environment: LOHAN_HOST, LOHAN_SSD (folders, separated as in PATH),
    LOHAN_DURABILITY. The state lies in the output folder if no `ssd` is named. `overwrite`: a new
    training replaces the state of an earlier one in the same output folder."""

    host: str | int | None = None
    ssd: tuple[str | os.PathLike[str], ...] = ()
    durability: str = ""
    device_memory: str | int | None = None
    micro_batch: int | None = None
    max_length: int | None = None  # of a batch in tokens; not given: what the first batch has
    grad_offload: str = "balanced"
    activations: str = "holistic"
    overlap: bool = True
    overwrite: bool = False
    moments: str | None = None  # how they are stored; not given: as `optim` says

    def budget(self, output_dir: str) -> Budget:
        named = os.environ.get("LOHAN_SSD", "")
        ssd = self.ssd or tuple(part for part in named.split(os.pathsep) if part) or (output_dir,)
        return Budget(
            host=self.host or os.environ.get("LOHAN_HOST"), ssd=ssd, device=self.device_memory,
            durability=self.durability or os.environ.get("LOHAN_DURABILITY", "step"),
        )  # fmt: skip
