"""Policies of `attach`: their fields are also accepted as keywords, and no others."""

from __future__ import annotations

import pytest

import lohan
from lohan.errors import ConfigError
from tests.support.models import attached, batches, small_model


def test_attach_accepts_policy_fields_as_keywords(tmp_path):
    data = batches(1, batch=4, seq=8)[0]
    flat = {"micro_batch": 2, "overlap": False, "store_name": "here", "resident": ["lm_head"]}
    policies = {
        "offload_policy": lohan.OffloadPolicy(micro_batch=2, overlap=False),
        "store_policy": lohan.StorePolicy(store_name="here"),
        "model_policy": lohan.ModelPolicy(resident=["lm_head"]),
    }
    plans = []
    for number, given in enumerate((flat, policies)):
        place = tmp_path / str(number)
        with attached(small_model("llama"), place, batch=data, **given) as session:
            assert (place / "here").is_dir()
            assert not session.plan.overlap and session.plan.micro_batch == 2
            assert "lm_head" not in {site.name for site in session.executor.blocks.sites}
            plans.append(session.plan)
    assert plans[0] == plans[1]


def test_a_keyword_replaces_the_field_of_a_policy(tmp_path):
    policy = lohan.OffloadPolicy(micro_batch=2, overlap=False)
    with attached(
        small_model("llama"),
        tmp_path,
        batch=batches(1, batch=4, seq=8)[0],
        offload_policy=policy,
        micro_batch=1,
    ) as session:
        assert (session.plan.micro_batch, session.plan.overlap) == (1, False)


def test_an_unknown_keyword_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="no keyword 'micro_batches'; it takes micro_batch"):
        attached(small_model("llama"), tmp_path, micro_batches=2)
    assert not list(tmp_path.iterdir())
