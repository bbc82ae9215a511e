"""`deterministic` selects kernels with a fixed order of sums while a session is open."""

from __future__ import annotations

import os

import pytest
import torch

from lohan import AdamW, Budget, attach
from lohan.config import TrainConfig
from lohan.device.determinism import WORKSPACE, deterministic_algorithms, fix_cublas_workspace
from lohan.errors import ConfigError
from tests.support.models import small_model


@pytest.fixture
def without_workspace(monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    yield
    os.environ.pop(WORKSPACE, None)


def test_flags_are_set_inside_the_context_and_restored_after_it():
    with deterministic_algorithms(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_workspace_is_fixed_before_cuda_is_used(without_workspace, monkeypatch):
    fix_cublas_workspace()
    assert os.environ[WORKSPACE] == ":4096:8"
    fix_cublas_workspace()
    del os.environ[WORKSPACE]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=rf"{WORKSPACE} is not set.*start it with {WORKSPACE}="):
        fix_cublas_workspace()
    os.environ[WORKSPACE] = ":0:0"
    with pytest.raises(ConfigError, match="is :0:0 and must be :4096:8"):
        fix_cublas_workspace()


def test_session_restores_torch_settings(tmp_path, without_workspace, monkeypatch):
    """Nothing changes on the CPU; elsewhere a session restores the settings at its end."""
    assert TrainConfig(deterministic=True).deterministic
    with attach(
        small_model("llama"),
        optimizer=AdamW(lr=1e-3),
        budget=Budget(host="64MiB", ssd=[tmp_path]),
        deterministic=True,
    ) as session:
        assert not torch.are_deterministic_algorithms_enabled() and WORKSPACE not in os.environ
        session.context.settings.enter_context(deterministic_algorithms(torch.device("cuda")))
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
