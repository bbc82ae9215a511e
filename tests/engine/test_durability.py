"""With a long commit interval, exports and clean ends write what is cached in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lohan
from lohan.store.admin import describe
from tests.support.models import FAMILY_CONFIGS, FAMILY_VOCAB, save_model

ROOMY = "100MiB"  # all weights and state stay in host memory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("durability") / "model"
    save_model(folder, FAMILY_CONFIGS["llama"])
    return folder


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, FAMILY_VOCAB, (2, 16), generator=torch.Generator().manual_seed(step))


def opened(model: Path, place: Path, **options: Any) -> tuple[torch.nn.Module, lohan.Session]:
    place.mkdir(exist_ok=True)
    commit_every = options.pop("commit_every", 100)
    module = lohan.load(model).train()
    session = lohan.attach(
        module,
        optimizer=lohan.AdamW(lr=1e-2),
        batch={"input_ids": batch(0).to("meta")},
        budget=lohan.Budget(host=ROOMY, ssd=[place], commit_every=commit_every),
        **options,
    )
    return module, session


def train(module: torch.nn.Module, session: lohan.Session, steps: int) -> None:
    for _ in range(steps):
        ids = batch(session.step)
        module(input_ids=ids, labels=ids).loss.backward()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    place = tmp_path_factory.mktemp("expected")
    module, session = opened(model, place / "ssd", commit_every="step")
    with session:
        train(module, session, 4)
        session.export(place / "out")
    return weights(place / "out")


def test_export_has_the_last_step(model: Path, tmp_path: Path, expected: Any) -> None:
    module, session = opened(model, tmp_path / "ssd")
    with session:
        assert session.plan.host_cached_weights and session.plan.host_cached_state
        train(module, session, 4)
        session.export(tmp_path / "out")
    actual = weights(tmp_path / "out")
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_closed_session_resumes_from_its_store(model: Path, tmp_path: Path, expected: Any) -> None:
    module, session = opened(model, tmp_path / "ssd")
    with session:
        train(module, session, 2)
    facts = describe(tmp_path / "ssd" / "lohan-store")
    assert facts["state"] == "clean" and facts["meta"]["progress"]["step"] == 2
    module, session = opened(model, tmp_path / "ssd", resume=True)
    with session:
        assert session.step == 2
        train(module, session, 2)
        session.export(tmp_path / "out")
    actual = weights(tmp_path / "out")
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_second_commit_and_export_write_nothing_to_the_store(model: Path, tmp_path: Path) -> None:
    module, session = opened(model, tmp_path / "ssd")
    with session:
        train(module, session, 1)
        session.commit()
        written = session.store.counters.bytes_written
        assert written > 0
        session.commit()
        session.export(tmp_path / "out")
        assert session.store.counters.bytes_written == written
