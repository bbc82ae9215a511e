"""The checks of `lohan doctor --gpu`.

Each check runs in its own process, so that a crash in one check does not hide the results of the
others: `python -m lohan.tools.gpu_checks NAME DEVICE FOLDER RESULT`.

A check returns figures, which doctor compares with what such a card should reach, and facts, which
are only reported. A check raises `WrongResult` if numbers that must be equal differ. On a software
device that stands in for a card in tests, everything runs at a small scale.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lohan.device import accelerator
from lohan.device.base import Device, pages
from lohan.device.choose import open_device
from lohan.engine.attach import attach
from lohan.engine.policies import Budget
from lohan.engine.probes import (
    BlockProbe,
    Effort,
    Sizes,
    adam_figure,
    computed_s,
    link_rates,
    profile,
)
from lohan.engine.session import Session
from lohan.errors import LohanError
from lohan.optim import AdamW
from lohan.store.io_engine import aligned_buffer, open_engine
from lohan.tools.gpu_bench import Bench, CheckResult, WrongResult
from lohan.tools.gpu_host_checks import pinnable, queue
from lohan.tools.gpu_norm_checks import liger, ranks, shared_memory
from lohan.util.trace import Span, busy_s
from lohan.util.units import GiB, KiB, MiB, format_bytes

NO_CARDS = ("software", "trial")  # name prefixes of software devices


# -- The device and its links ----------------------------------------------------------------------


def device(bench: Bench) -> CheckResult:
    """Report name, memory, driver and PCIe link of the device."""
    opened = bench.open()
    torch_device, free = opened.torch_device, opened.memory_bytes()
    (torch.ones(4, device=torch_device) + 1).cpu()  # Check that a kernel runs.
    facts: dict[str, Any] = {"dtype": opened.default_dtype, "free": format_bytes(free)}
    if torch_device.type == "cuda":
        properties = torch.cuda.get_device_properties(torch_device)
        facts |= {
            "memory": format_bytes(properties.total_memory),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        }
    return CheckResult({"free_bytes": free}, facts | pcie_link_of(torch_device))


def pcie_link_of(torch_device: torch.device) -> dict[str, str]:
    """Return speed and width of the PCIe link, as the kernel reports them in sysfs.

    The result is empty if the kernel does not report them.
    """
    if torch_device.type != "cuda":
        return {}
    properties: Any = torch.cuda.get_device_properties(torch_device)
    parts = [getattr(properties, f"pci_{name}_id", -1) for name in ("domain", "bus", "device")]
    folder = Path("/sys/bus/pci/devices/{:04x}:{:02x}:{:02x}.0".format(*parts))
    names = ("current_link_speed", "max_link_speed", "current_link_width", "max_link_width")
    link = {}
    for name in names:
        with suppress(OSError):
            link[name] = (folder / name).read_text().strip()
    return link


def pinning(bench: Bench) -> CheckResult:
    """Check that host memory can be pinned and that a failed registration leaves no error."""
    opened, size = bench.open(), 1 * GiB if bench.real else 16 * MiB
    start = time.perf_counter()
    memory = opened.host_memory(size)
    taken_s = time.perf_counter() - start
    if not torch.from_numpy(memory).is_pinned():
        raise WrongResult(f"{format_bytes(size)} of host memory cannot be pinned")
    if accelerator.can_register(opened.torch_device):
        with suppress(RuntimeError):  # Registering memory twice must fail.
            accelerator.register(memory)
            raise WrongResult("registering the same memory twice is no error here")
    if (torch.ones(4, device=opened.torch_device) + 1).sum().item() != 8:
        raise WrongResult("a sum of eight ones is not 8")
    return CheckResult({"pin_rate": size / taken_s})


def links(bench: Bench) -> CheckResult:
    """Measure copies to the device and from it, one at a time and concurrently."""
    opened, size = bench.open(), 256 * MiB if bench.real else 1 * MiB
    seconds = 1.0 if bench.real else 0.02
    h2d, d2h = link_rates(opened, size=size, seconds=seconds)
    buffers = [opened.allocate(size) for _ in range(2)]
    host = [torch.from_numpy(opened.host_memory(size)) for _ in range(2)]
    host[0].copy_(torch.arange(size, dtype=torch.uint8))
    rounds = 8 if bench.real else 2
    start = time.perf_counter()
    for _ in range(rounds):
        copied = opened.copy("h2d", [(buffers[0], host[0])])
        out = opened.copy("d2h", [(host[1], buffers[1])])
    copied.synchronize()
    out.synchronize()
    both = 2 * rounds * size / (time.perf_counter() - start)
    opened.copy("d2h", [(host[1], buffers[0])]).synchronize()
    if not torch.equal(host[0], host[1]):
        raise WrongResult("other bytes came back from the device than were sent there")
    return CheckResult(
        {"h2d": h2d, "d2h": d2h, "both_ways": both}, pcie_link_of(opened.torch_device)
    )


def waits(bench: Bench) -> CheckResult:
    """Check that a thread that waits for the device sleeps instead of occupying a core."""
    opened = bench.open()
    torch_device, width = opened.torch_device, 4096 if bench.real else 64
    matrix = torch.ones(width, width, device=torch_device, dtype=torch.float32)
    for _ in range(20):
        matrix = (matrix @ matrix).clamp(max=1.0)
    event = opened.mark()
    start, burnt = time.perf_counter(), time.thread_time()
    event.synchronize()
    waited_s, burnt_s = time.perf_counter() - start, time.thread_time() - burnt
    return CheckResult({"waiting_cpu": burnt_s / waited_s} if waited_s > 0.01 else {})


def direct_io(bench: Bench) -> CheckResult:
    """Check that reads from the drive into pinned memory are correct and as fast as others."""
    opened, size = bench.open(), 256 * MiB if bench.real else 4 * MiB
    engine = open_engine("auto")
    try:
        number = engine.open(str(bench.folder / "probe.bin"), size=size, create=True)
        sent = aligned_buffer(size)
        sent[:] = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        engine.wait(engine.write(number, 0, sent), 60.0)
        engine.sync(number)

        def rate(buffer: Any) -> float:
            buffer[:] = 0
            durations = []
            for _ in range(5 if bench.real else 1):
                start = time.perf_counter()
                engine.wait(engine.read(number, 0, buffer), 60.0)
                durations.append(time.perf_counter() - start)
            if not (buffer == sent).all():
                raise WrongResult("a drive's read into registered memory brought other bytes")
            return size / median(durations)

        plain, registered = rate(pages(size)), rate(opened.host_memory(size))
    finally:
        engine.close()
    return CheckResult({"registered_read": registered / plain}, {"read_bytes_per_s": plain})


# -- Compute speed ---------------------------------------------------------------------------------


def matmul(bench: Bench) -> CheckResult:
    """Measure a matrix product in bf16 and check its result."""
    opened, width = bench.open(), 8192 if bench.real else 64
    torch_device, kind = opened.torch_device, torch.bfloat16
    a, b = (torch.randn(width, width).to(torch_device, kind) for _ in range(2))
    product = a @ b
    wanted = a[:4].cpu().double() @ b.cpu().double()
    error = float((product[:4].cpu().double() - wanted).norm() / wanted.norm())
    if not error < 1e-2:
        raise WrongResult(f"a matrix product in bf16 is {error:.1e} from the CPU's in fp64")
    rounds = 10 if bench.real else 2
    durations = [computed_s(opened, lambda: a @ b) for _ in range(rounds)]
    return CheckResult({"matmul": 2.0 * width**3 / median(durations)}, {"error": error})


def block(bench: Bench) -> CheckResult:
    """Measure forward and backward of a decoder block with 4,096 features."""
    opened = bench.open()
    sizes = Sizes(hidden=4096, inner=11008, heads=32) if bench.real else Sizes(64, 128, 4, 256)
    probe, tokens = BlockProbe(replace(sizes, copies=1), opened), 4096 if bench.real else 32
    runs = 5 if bench.real else 1
    probe.forward_s(tokens)
    forward_s = median(probe.forward_s(tokens) for _ in range(runs))
    backward_s = median(probe.backward_s(tokens) for _ in range(runs))
    flops = probe.flops(tokens)
    return CheckResult(
        {"block_forward": flops / forward_s, "block_backward": 2 * flops / backward_s}
    )


def optimizer(bench: Bench) -> CheckResult:
    """Measure AdamW on the CPU, alone and while both links are busy."""
    opened = bench.open()
    sizes = Sizes(copies=2) if bench.real else Sizes(copies=1, chunk_params=2**14)
    seconds = 1.0 if bench.real else 0.01
    alone = adam_figure(sizes, opened.default_dtype)
    alone.measure(seconds)
    with busy_links(opened, 64 * MiB if bench.real else 64 * KiB):
        during = adam_figure(sizes, opened.default_dtype)
        during.measure(seconds)
    return CheckResult(
        {
            "adam": sizes.chunk_params / alone.median_s,
            "adam_beside_copies": sizes.chunk_params / during.median_s,
        }
    )


@contextmanager
def busy_links(device: Device, size: int) -> Iterator[None]:
    """Copy `size` bytes in both directions repeatedly, in a thread, until the context exits."""
    on_device, host = device.allocate(2 * size), torch.from_numpy(device.host_memory(2 * size))
    stop = Event()

    def work() -> None:
        device.enter("h2d")
        while not stop.is_set():
            copied = device.copy("h2d", [(on_device[:size], host[:size])])
            device.copy("d2h", [(host[size:], on_device[size:])]).synchronize()
            copied.synchronize()

    thread = Thread(target=work, name="busy links")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# -- Training: modes that must give the same numbers -----------------------------------------------


Batches = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    digest: str  # SHA-256 of weights and optimizer state

    def check(self, other: Trained, what: str) -> None:
        if list(map(repr, self.losses)) != list(map(repr, other.losses)):
            raise WrongResult(f"{what}: losses {self.losses} and {other.losses}")
        if self.digest != other.digest:
            raise WrongResult(f"{what}: the same losses, other weights or moments")


def trained(
    bench: Bench,
    model: nn.Module,
    batches: Batches,
    name: str,
    *,
    late: bool = False,
    **options: Any,
) -> Trained:
    """Train a copy of the model, and return its losses and the digest of its state.

    With `late`, the device has random pauses on its lanes.
    """
    folder = bench.folder / name
    folder.mkdir()
    losses = []
    opened = bench.open_late() if late else bench.open()
    with attach(
        copy.deepcopy(model),
        optimizer=AdamW(lr=1e-3),
        device=opened,
        batch=batches[0],
        budget=Budget(host="1GiB", ssd=[folder]),
        **options,
    ) as session:
        torch.manual_seed(11)
        for batch in batches:
            losses.append(step(session, batch))
        return Trained(losses, digest_of(session))


def step(session: Session, batch: Mapping[str, torch.Tensor]) -> float:
    output = session.model(**batch)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    return float(loss.item())


def digest_of(session: Session) -> str:
    session.flush()
    digest, store = hashlib.sha256(), session.store
    for region in store.layout.regions:
        for chunk, size in enumerate(() if region.scratch else region.chunks):
            buffer = aligned_buffer(size)
            store.wait(store.read(region.key, chunk, buffer))
            digest.update(buffer.data)
    return digest.hexdigest()


@contextmanager
def in_one_order() -> Iterator[None]:
    """Use only kernels with a fixed order of summation in the `with` body.

    The rounding differences of other kernels would hide a race.
    """
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


def llama(bench: Bench, **sizes: Any) -> nn.Module:
    from transformers import LlamaConfig

    width = 512 if bench.real else 32
    config = LlamaConfig(
        **{
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 999,
            "max_position_embeddings": 4096,
            "use_cache": False,
            "tie_word_embeddings": False,
            **sizes,
        }
    )
    return _model_of(config)


def gpt2(bench: Bench) -> nn.Module:
    from transformers import GPT2Config

    config = GPT2Config(
        n_embd=512 if bench.real else 32,
        n_layer=3,
        n_head=4,
        vocab_size=999,
        n_positions=512,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        attn_pdrop=0.2,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
    )
    return _model_of(config)


def _model_of(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    make: Callable[..., nn.Module] = AutoModelForCausalLM.from_config
    return make(config).train()


def tokens(bench: Bench, steps: int = 3, *, seq: int | None = None, vocab: int = 999) -> Batches:
    seq = seq or (256 if bench.real else 12)
    draw = torch.Generator().manual_seed(1)
    samples = [torch.randint(3, vocab, (4, seq), generator=draw) for _ in range(steps)]
    return [{"input_ids": ids, "labels": ids} for ids in samples]


def overlap(bench: Bench) -> CheckResult:
    """Check that overlapped steps give the same bits as serial ones, also with delayed lanes."""
    with in_one_order():
        model, batches = llama(bench), tokens(bench)
        wanted = trained(
            bench, model, batches, "plain", overlap=False, update_mode="serial", micro_batch=2
        )
        for mode in ("serial", "optimized", "balanced"):
            result = trained(
                bench, model, batches, mode, late=True, update_mode=mode, micro_batch=2
            )
            result.check(wanted, f"{mode} with overlap, and without")
    return CheckResult(facts={"losses": wanted.losses})


def saved_activations(bench: Bench) -> CheckResult:
    """Check that saved activations give the same bits as recomputed ones."""
    with in_one_order():
        model, batches = llama(bench), tokens(bench)
        results = [
            trained(bench, model, batches, name, late=True, activations=name, micro_batch=1)
            for name in ("recompute", "all")
        ]
    results[1].check(results[0], "activations saved, and recomputed")
    return CheckResult()


def padded_dropout(bench: Bench) -> CheckResult:
    """Check training with a padding mask and dropout in attention.

    Both select another attention kernel, whose random state is on the host.
    """
    model, batches = gpt2(bench), tokens(bench)
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, -3:] = 0
    masked = [
        trained(bench, model, batches, name, activations=name, micro_batch=2)
        for name in ("recompute", "all")
    ]
    for one, other in zip(*(each.losses for each in masked), strict=True):
        if not abs(one - other) <= 1e-3 * abs(one):  # The backward kernel sums in no fixed order.
            raise WrongResult(f"activations saved and recomputed: losses {one} and {other}")
    return CheckResult(facts={"losses": masked[0].losses})


def tied_weights(bench: Bench) -> CheckResult:
    """Check training with tied embedding and head, whose gradient is a sum of two parts."""
    with in_one_order():
        model, batches = llama(bench, tie_word_embeddings=True), tokens(bench)
        wanted = trained(bench, model, batches, "plain", overlap=False, update_mode="serial")
        overlapped = trained(bench, model, batches, "overlap", late=True)
        overlapped.check(wanted, "tied weights with overlap")
    return CheckResult()


class Positions(nn.Module):
    """Blocks preceded by a position table: a buffer in the checkpoint that never changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.register_buffer("pos_embed", torch.randn(1, 6 * 2**18))
        self.pos_embed: torch.Tensor
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = x + self.pos_embed[:, : x.shape[-1]]
        for each in self.blocks:
            hidden = hidden + each(hidden)
        return nn.functional.mse_loss(hidden, target)


def large_buffer(bench: Bench) -> CheckResult:
    """Check that a model with a buffer of several megabytes that never changes can train."""
    batches = [{"x": torch.randn(2, 5, 32), "target": torch.randn(2, 5, 32)} for _ in range(2)]
    trained(bench, Positions(), batches, "run")
    return CheckResult()


# -- Training: memory and speed --------------------------------------------------------------------


SETTLING_STEPS = 2  # After these steps, memory requests are the same in every step.


def memory(bench: Bench) -> CheckResult:
    """Check that overlapped steps stay within the planned device memory.

    After the first two steps, the allocator must also find room without freeing its cache.
    """
    if torch.accelerator.current_accelerator() is None or not hasattr(
        torch.get_device_module(), "max_memory_reserved"
    ):
        return CheckResult(facts={"skipped": "this backend keeps no count of reserved memory"})
    module: Any = torch.get_device_module()
    wide = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8}
    model = llama(bench, **(wide if bench.real else {"hidden_size": 128, "num_hidden_layers": 4}))
    batches = tokens(bench, 4, seq=1024 if bench.real else 64)
    limit = 4 * GiB if bench.real else 96 * MiB
    with attach(
        model.to(torch.bfloat16) if bench.real else model,
        optimizer=AdamW(lr=1e-4),
        device=bench.open(limit),
        batch=batches[0],
        budget=Budget(host="4GiB" if bench.real else "256MiB", ssd=[bench.folder]),
    ) as session:
        module.reset_peak_memory_stats()
        for number, batch in enumerate(batches):
            step(session, batch)
            if number == SETTLING_STEPS - 1:
                settled_retries = allocator().get("num_alloc_retries", 0)
        retries = allocator().get("num_alloc_retries", 0) - settled_retries
        planned = session.plan.tier_bytes("device")
        lines = {e.owner: e.bytes for e in session.plan.ledger if e.tier == "device"}
    reserved = module.max_memory_reserved()
    facts = {"planned": planned, "reserved": reserved, "lines": lines}
    return CheckResult({"reserved_of_planned": reserved / planned, "alloc_retries": retries}, facts)


def training(bench: Bench) -> CheckResult:
    """Train a model of about one billion parameters, fewer on a small card, for six steps.

    Losses are compared with plain torch in the device's memory. The check measures which share of a
    step the device is busy, and compares the step time with the plan's forecast.
    """
    opened = bench.open()
    model, batches = trial_model(bench, opened.memory_bytes())
    limit = 8 * GiB if bench.real else 128 * MiB
    ssd = [bench.folder]
    seq = batches[0]["input_ids"].shape[1]
    width = int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]
    wanted = plain_losses(model, batches, opened)
    rates = profile(ssd, device=bench.open(), effort=effort_for(bench, width))
    budget = Budget(host="8GiB" if bench.real else "256MiB", ssd=ssd)
    losses, ends, launched_s = [], [], []
    with attach(
        model,
        optimizer=AdamW(lr=1e-4),
        device=bench.open(limit),
        batch=batches[0],
        budget=budget,
        profile=rates,
    ) as session:
        spans: list[Span] = []
        for batch in batches:
            session.executor.trace.take_step()
            start, launching_s = time.perf_counter(), time.thread_time()
            loss = session.model(**batch).loss
            launched_s.append(time.thread_time() - launching_s)
            loss.backward()
            losses.append(float(loss.item()))
            ends.append((start, time.perf_counter()))
            spans = session.executor.trace.take_step()
        context = session.context
        assert context.workload is not None and context.profile is not None
        forecast = context.forecast(context.profile, session.plan)
        parameters, sites = context.blocks.parameters, len(context.blocks.sites)
        slices = -(-len(batches[0]["input_ids"]) // (session.plan.micro_batch or 1))
    for measured, expected in zip(losses, wanted, strict=True):
        if not abs(measured - expected) <= 2e-2 * abs(expected):
            raise WrongResult(f"losses {losses}, with plain torch {wanted}")
    steps_s = [stop - start for start, stop in ends[2:]]
    start, stop = ends[-1]
    share = busy_s(spans, start, stop)["compute"] / (stop - start)
    figures = {
        "step_of_forecast": median(steps_s) / forecast.step_s,
        "launch_s_per_slice": median(launched_s[2:]) / (sites * slices),
    }
    if forecast.binding == "compute":
        figures["device_busy"] = share
    return CheckResult(
        figures,
        {
            "parameters": parameters,
            "tokens": batches[0]["input_ids"].numel(),
            "seq": seq,
            "losses": losses,
            "plain_losses": wanted,
            "steps_s": steps_s,
            "forecast_s": forecast.step_s,
            "forecast_lanes_s": forecast.busy_s,
            "binding": forecast.binding,
            "device_busy": share,
            "profile": asdict(rates),
            "last_step": [
                (s.lane, s.name, s.start_s - start, s.stop_s - start) for s in spans[:4000]
            ],
        },
    )


# Bytes per parameter of plain torch: 16-bit weight and gradient, fp32 master, gradient and moments.
PLAIN_BYTES = 22
LAYER = 12 * 2048 * 2048  # approximate number of parameters per layer


def trial_model(bench: Bench, device_bytes: int) -> tuple[nn.Module, Batches]:
    if not bench.real:
        return llama(bench), tokens(bench, 6)
    layers = max(2, min(16, int(0.6 * device_bytes / PLAIN_BYTES / LAYER)))
    model = llama(
        bench,
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=layers,
        vocab_size=32000,
    )
    return model.to(torch.bfloat16), tokens(bench, 6, seq=1024, vocab=32000)


def effort_for(bench: Bench, width: int) -> Effort:
    if bench.real:
        sizes = Sizes(hidden=width, inner=11 * width // 4, heads=width // 64, vocabulary=32000)
        return Effort(sizes=sizes, drive_bytes=1 * GiB)
    return Effort(
        sizes=Sizes(
            hidden=width, inner=2 * width, heads=4, vocabulary=128, copies=1, chunk_params=2**12
        ),
        tokens=(8, 32),
        head_tokens=8,
        seconds=0.0,
        compute_seconds=1.0,
        drive_seconds=0.02,
        drive_bytes=1 * MiB,
        chunk_bytes=64 * KiB,
        link_bytes=1 * MiB,
    )


def plain_losses(model: nn.Module, batches: Batches, opened: Device) -> list[float]:
    """Return the losses of plain torch, with AdamW on fp32 master weights on the device."""
    torch_device = opened.torch_device
    on_device = copy.deepcopy(model).to(torch_device)
    masters = [p.detach().float().clone().requires_grad_() for p in on_device.parameters()]
    plain = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0)
    losses = []
    for batch in batches:
        loss = on_device(**{name: tensor.to(torch_device) for name, tensor in batch.items()}).loss
        loss.backward()
        losses.append(float(loss.item()))
        with torch.no_grad():
            for master, parameter in zip(masters, on_device.parameters(), strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None  # type: ignore[union-attr]
            plain.step()
            for master, parameter in zip(masters, on_device.parameters(), strict=True):
                parameter.copy_(master)
    del on_device, masters, plain
    gc.collect()
    opened.release_cached_memory()
    return losses


# -- Running one check in this process -------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    run: Callable[[Bench], CheckResult]
    deadline_s: float

    @property
    def about(self) -> str:
        return " ".join((self.run.__doc__ or "").split())


CHECKS: dict[str, Check] = {
    run.__name__.replace("_", "-"): Check(run, deadline_s)
    for run, deadline_s in (
        (device, 120),
        (pinning, 120),
        (pinnable, 180),
        (queue, 120),
        (links, 120),
        (waits, 120),
        (direct_io, 180),
        (matmul, 180),
        (block, 180),
        (optimizer, 180),
        (overlap, 300),
        (saved_activations, 300),
        (padded_dropout, 300),
        (tied_weights, 300),
        (large_buffer, 300),
        (liger, 300),
        (ranks, 600),
        (shared_memory, 300),
        (memory, 600),
        (training, 1800),
    )
}


def card_name(device_name: str) -> str:
    """Return the name of the card that a device name refers to, or else the device type."""
    torch_device = open_device(device_name).torch_device
    return (
        torch.cuda.get_device_name(torch_device)
        if torch_device.type == "cuda"
        else torch_device.type
    )


def is_real(card: str) -> bool:
    return not card.lower().startswith(NO_CARDS)


def allocator() -> dict[str, int]:
    """Return the statistics of torch's allocator that this backend provides."""
    with suppress(AttributeError, RuntimeError, AssertionError):
        statistics = torch.get_device_module().memory_stats()
        names = (
            "allocated_bytes.all.peak",
            "reserved_bytes.all.peak",
            "num_alloc_retries",
            "num_ooms",
            "inactive_split_bytes.all.peak",
        )
        return {name: statistics[name] for name in names if name in statistics}
    return {}


def run_here(name: str, device_name: str, folder: Path) -> dict[str, Any]:
    """Run a check and return its result as a JSON-serialisable mapping."""
    result: dict[str, Any] = {"state": "ok"}
    try:
        result["card"] = card_name(device_name)
        with TemporaryDirectory(prefix="lohan-doctor-", dir=folder) as scratch:
            bench = Bench(device_name, Path(scratch), is_real(result["card"]))
            outcome = CHECKS[name].run(bench)
        result |= {"figures": outcome.figures, "facts": outcome.facts}
    except Exception as error:
        state = "wrong" if isinstance(error, WrongResult) else "failed"
        notes = getattr(error, "__notes__", [])
        result |= {
            "state": state,
            "foreseen": isinstance(error, LohanError),
            "error": "\n".join([f"{type(error).__name__}: {error}", *notes]),
            "traceback": traceback.format_exc(),
        }
    return result | {"allocator": allocator()}


def main(name: str, device_name: str, folder: str, result: str) -> None:
    outcome = run_here(name, device_name, Path(folder))
    Path(result).write_text(json.dumps(outcome, default=str))
    # A device in an error state may hang or crash during interpreter shutdown. The result file is
    # complete, so exit without a shutdown.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
