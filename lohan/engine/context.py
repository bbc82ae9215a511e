"""The inputs from which an attached model is planned: blocks, batch, machine and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import nn

from lohan.capture.blocks import DTYPE_NAMES, cut_for
from lohan.capture.fake import CPU
from lohan.capture.footprint import inventories, measure
from lohan.capture.tracing import SavePlans, shapes_together
from lohan.checkpoint.adapters import base_of
from lohan.checkpoint.packed import pack_base
from lohan.device.base import CpuDevice, Device
from lohan.device.choose import Backend
from lohan.device.ranks import ALONE, ProcessGroup
from lohan.engine.head import find_decoder
from lohan.errors import ModelError
from lohan.model.layout import Blocks
from lohan.model.machine import Profile
from lohan.model.options import PlanOptions
from lohan.model.plan import Plan
from lohan.model.state import STATE_FORMATS
from lohan.model.workload import BatchWorkload, Footprint
from lohan.planner.forecast import (
    Forecast,
    Simulator,
    profile_of_step,
    step_work,
)
from lohan.planner.memory import MemoryModel
from lohan.planner.planner import PlanProblem
from lohan.util.trace import Span


@dataclass(frozen=True)
class PlanContext:
    """The inputs of planning for an attached model: blocks, options, batch, machine and ranks."""

    blocks: Blocks
    options: PlanOptions
    workload: BatchWorkload | None
    host_bytes: int
    # the whole machine, not divided among ranks; None if it is not known
    profile: Profile | None = None
    device: Device = field(default_factory=CpuDevice)
    device_bytes: int | None = None  # None if the device has no memory of its own
    process_group: ProcessGroup = ALONE  # the ranks that share the state
    backend: Backend | None = None  # compiles the blocks; None if they are not compiled
    check: bool = False  # whether the first call of each block is compared with a plain call
    log_room: int | None = None  # as in PlanProblem
    plan_is_given: bool = False  # whether the caller gave the plan, so that `replan` keeps it
    settings: ExitStack = field(default_factory=ExitStack)  # restores torch's settings at the end

    def forecast(self, profile: Profile, plan: Plan, *, clipped: bool = False) -> Forecast:
        """Return the forecast of one step of a plan on a machine; `workload` must not be None.

        `clipped` states whether the step is clipped.
        """
        assert self.workload is not None
        return Simulator(profile, self.shards, self.workload).forecast(plan, clipped=clipped)

    def problem(self, options: PlanOptions, *, profile: Profile | None) -> PlanProblem:
        """Return the planning problem of this rank with these options and this profile."""
        return PlanProblem(
            self.shards,
            options,
            host_bytes=self.host_bytes,
            workload=self.workload,
            profile=profile,
            device_bytes=self.device_bytes,
            log_room=self.log_room,
        )

    def measured(self, spans: Sequence[Span], plan: Plan) -> Profile | None:
        """Return the machine profile measured by a step of `plan`, or None if it is incomplete."""
        assert self.workload is not None
        work = step_work(
            self.shards, self.workload, plan, has_own_memory=self.device.has_own_memory
        )
        # Early in a run, there is one logged step since the last full state.
        work = replace(work, logged=min(1.0, work.logged))
        return profile_of_step(
            spans,
            work,
            host_bytes=self.host_bytes,
            device=self.device.name,
            device_bytes=self.device_bytes or 0,
            unified=not self.device.has_own_memory and not self.device.computes_on_cores,
        )

    def workload_for(self, plan: Plan) -> BatchWorkload | None:
        """Return the workload with the tile size of a plan, or None if the batch is unknown."""
        return None if self.workload is None else self.workload.in_tiles(plan.tiles)

    @property
    def shards(self) -> Blocks:
        """The blocks with this rank's shard of every group."""
        return self.process_group.ranks.shards(self.blocks)


# -- The batch of an example, and what blocks keep of it -------------------------------------------


def is_tested(model: nn.Module) -> bool:
    """Return whether models of this class were compared step by step with in-memory training."""
    kind = type(base_of(model))
    is_library = kind.__module__.startswith(("transformers.", "diffusers."))
    return is_library and kind.__name__ in tested_classes()


@cache
def tested_classes() -> frozenset[str]:
    """Return the names of the classes that docs/models_sweep.py has compared.

    The same list is in docs/models.md.
    """
    file = resources.files("lohan.capture").joinpath("tested.txt")
    return frozenset(file.read_text(encoding="utf-8").split())


def blocks_of(
    model: nn.Module, batch: Mapping[str, Any], *, base: str = "", dtype: str = "fp32"
) -> Blocks:
    """Return a model's groups and sites, according to a call with this batch.

    If `base` is given, the frozen base is packed for the dtype.
    """
    blocks = cut_for(model, _shapes(model, batch))
    return pack_base(model, blocks, base, STATE_FORMATS[dtype].weight_bytes) if base else blocks


def workload_of(
    model: nn.Module, blocks: Blocks, batch: Mapping[str, Any], torch_device: torch.device = CPU
) -> BatchWorkload:
    """Return the workload of a batch with the shapes of `batch`, for blocks on `torch_device`."""

    def in_tiles(tokens: int) -> BatchWorkload:
        """Return the workload of a batch whose blocks run in tiles.

        Backward always repeats the work inside tiles. Its FLOPs are computed as the difference
        between recomputation without tiles and recomputation with tiles.
        """
        tiled = _workload(model, blocks, batch, torch_device, tiles=tokens)
        seq, shapes = whole.seq, dict(tiled.shapes)
        for name, shape in shapes.items():
            untiled = whole.shapes[name]
            repeated_flops = untiled.recompute_flops_at(seq) - shape.recompute_flops_at(seq)
            inside = untiled.elements - shape.elements
            shapes[name] = replace(
                shape, tile_flops=max(0.0, repeated_flops), tile_elements=max(0.0, inside)
            )
        return replace(tiled, shapes=shapes, tiled=lambda tokens: whole.in_tiles(tokens))

    whole = replace(_workload(model, blocks, batch, torch_device, tiles=0), tiled=in_tiles)
    return whole


def _workload(
    model: nn.Module,
    blocks: Blocks,
    batch: Mapping[str, Any],
    torch_device: torch.device,
    *,
    tiles: int,
) -> BatchWorkload:
    shapes = _shapes(model, batch)
    tensors = [value for value in shapes.values() if isinstance(value, torch.Tensor)]
    first = next((tensor for tensor in tensors if tensor.ndim >= 2), tensors[0])
    base: Any = base_of(model)
    head = base.get_output_embeddings() if find_decoder(base) is not None else None
    head_site = next((s for s in blocks.sites if model.get_submodule(s.name) is head), None)
    samples = first.shape[0]
    kinds, sliced = inventories(
        model, blocks, shapes, micro_batch=samples, torch_device=torch_device, tiles=tiles
    )
    # A model may call its blocks with several rows per sample, such as the choices of a question.
    rows = max(samples, sliced.rows)
    seen = {samples: sliced}

    def footprint(micro_batch: int) -> Footprint:
        if micro_batch not in seen:
            seen[micro_batch] = measure(
                model,
                blocks,
                shapes,
                micro_batch=micro_batch,
                torch_device=torch_device,
                tiles=tiles,
            )
        # The head runs in slices of tokens, which are planned separately.
        if head_site is not None:
            seen[micro_batch].sites.pop(head_site.name, None)
        return seen[micro_batch]

    repeated = dict(kinds)
    if head_site is not None:
        repeated.pop(head_site.name, None)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    seq, block_shapes = shapes_together(repeated, (rows, *first.shape[1:]))
    widest = max((shape.input_elements for shape in block_shapes.values()), default=0)
    return BatchWorkload(
        batch=rows,
        seq=seq,
        measure=footprint,
        samples=samples if rows > samples else 0,
        hidden=getattr(text, "hidden_size", 0) or int(widest),
        vocabulary=getattr(text, "vocab_size", 0) if head is not None else 0,
        head_group=head_site.groups[0] if head_site is not None else None,
        text="input_ids" in shapes,
        shapes=block_shapes,
        # Blocks of different kinds may have different classes.
        stored=lambda name, classes: kinds[name].kept_bytes(classes & kinds[name].keys.keys()),
        offloaded=lambda name, classes, share: kinds[name].offloaded_bytes(
            classes & kinds[name].keys.keys(), share
        ),
        tiles=tiles,
    )


def save_plans(blocks: Blocks, plan: Plan, workload: BatchWorkload | None) -> SavePlans:
    """Return the classes of activations that each site keeps for backward, and their bytes."""
    if workload is None or not plan.kept:
        return SavePlans({}, {})
    workload = workload.in_tiles(plan.tiles)
    memory = MemoryModel.of(blocks, plan, workload)
    numbers = {site.name: number for number, site in enumerate(blocks.sites)}
    classes, planned_bytes = dict[int, frozenset[str]](), dict[int, int]()
    for name in memory.sizes.names:
        classes_of_site, number = (
            {part.name for part in workload.shapes[name].activations},
            numbers[name],
        )
        classes[number] = frozenset(memory.sizes.classes_of(plan.kept, name) & classes_of_site)
        planned_bytes[number] = memory.sizes.bytes_of(plan.kept, name)
    return SavePlans(classes, planned_bytes)


def _shapes(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch without labels if the loss is sliced, so that no logits are computed."""
    sliced = find_decoder(base_of(model)) is not None
    return {name: value for name, value in batch.items() if name != "labels" or not sliced}


def _dtype_name(model: nn.Module) -> str:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1 or (dtype := dtypes.pop()) not in DTYPE_NAMES:
        dtype_names = ", ".join(
            sorted(str(d) for d in dtypes | {p.dtype for p in model.parameters()})
        )
        raise ModelError(
            f"{type(model).__name__} has parameters of {dtype_names}; convert all of them to one "
            f"of {', '.join(str(dtype) for dtype in DTYPE_NAMES)} first"
        )
    return DTYPE_NAMES[dtype]
