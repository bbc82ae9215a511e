"""Runs of a small Llama whose blocks keep activations, in memory or on SSD."""

from __future__ import annotations

import random
import time
import warnings
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import lohan
from lohan.capture.blocks import cut
from lohan.engine.context import workload_of
from lohan.model.machine import Drive, Profile
from lohan.model.options import PlanOptions
from lohan.planner.activations import HOST_ONLY
from lohan.planner.planner import PlanProblem, closed_form_plan
from lohan.schedule.actions import Action
from tests.support.delayed_runs import delay_actions
from tests.support.model_families import save_model

SEQ = 48
STEPS = 3


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a Llama of five thin blocks."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        use_cache=False,
        tie_word_embeddings=False,
    )
    save_model(path, config, seed=7)
    return path


def batch_of(model: torch.nn.Module, seq: int = SEQ) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (4, seq), generator=generator)


def train(
    folder: Path,
    ssd: Path,
    *,
    host: str = "64MiB",
    delays: int | None = None,
    between=None,
    seq: int = SEQ,
    **options,
):
    """Return losses and checksums after some steps, the last plan, and the bytes moved."""
    model = lohan.load(folder).train()
    ids = batch_of(model, seq)
    ssd.mkdir()
    with (
        lohan.attach(
            model,
            optimizer=lohan.AdamW(lr=1e-2),
            batch={"input_ids": ids},
            budget=lohan.Budget(host=host, ssd=[ssd]),
            **options,
        ) as session,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        losses = []
        for step in range(STEPS):
            if delays is not None:
                slow_down(session, delays)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            if between is not None and step == 1:
                between(session)
        session.flush()
        acts = session.executor.runner.activation_spill
        moved = acts.moved_bytes if acts is not None else 0
        store = session.store
        sums = [
            store.checksum(region.key, chunk)
            for region in store.layout.regions
            if not region.scratch
            for chunk in range(len(region.chunks))
        ]
        plan = session.plan
    return (losses, sums), plan, moved


def slow_down(session: lohan.Session, seed: int) -> None:
    chance = random.Random(seed)

    def delay(action: Action) -> None:
        if chance.random() < 0.1:
            time.sleep(chance.random() * 0.002)

    delay_actions(session, delay)


# Whatever can be kept is worth it on this machine.
SLOW = Profile(
    name="slow",
    device="cpu",
    compute=((1.0, 1e6),),
    host_bytes=2**30,
    adam=1e12,
    drives=(Drive(name="fast", read=1e11, write=1e11, mixed=1e11),),
)


def smaller(
    folder: Path,
    micro_batch: int | None,
    clip: float,
    overlap: bool = True,
    policy: str = "all",
    seq: int = SEQ,
) -> str:
    """Return a budget that holds a part of what a policy keeps."""
    model = lohan.load(folder).train()
    blocks = cut(model)
    workload = workload_of(model, blocks, {"input_ids": batch_of(model, seq).to("meta")})
    options = PlanOptions(
        dtype="fp32", micro_batch=micro_batch, clip=clip, activations=policy, overlap=overlap
    )
    size = 2**26
    while size > 2**16:
        plan = closed_form_plan(
            PlanProblem(blocks, options, host_bytes=size, workload=workload, profile=SLOW)
        )
        if plan.spilled_sites and (plan.kept or policy in HOST_ONLY):
            return f"{size}b"
        size = size * 24 // 25
    raise AssertionError("no budget made activations move")
