"""The continuous integration runs the targets of the Makefile on pushes and tags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    loaded: dict[str, Any] = yaml.safe_load(text)
    loaded["on"] = loaded.pop(True)  # YAML 1.1 reads the key `on` as a boolean.
    return loaded


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def needed(jobs: dict[str, Any], name: str) -> set[str]:
    """Return the jobs that must have succeeded before a job starts."""
    needs = jobs[name].get("needs", [])
    direct = {needs} if isinstance(needs, str) else set(needs)
    return direct.union(*(needed(jobs, other) for other in direct))


def test_pushes_and_tags_run_lint_tests_wheels_and_docs(workflow: dict[str, Any]) -> None:
    push = workflow["on"]["push"]
    assert push == {"branches": ["main"], "tags": ["v*"]} and "pull_request" in workflow["on"]
    jobs = {name: job for name, job in workflow["jobs"].items() if "if" not in job}
    run = "\n".join(map(commands, jobs.values()))
    for target in ("make lint", "make test", "make wheel", "make docs-site"):
        assert re.search(rf"^{target}\b", run, re.MULTILINE), target


def test_every_target_and_script_exists(workflow: dict[str, Any]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    run = "\n".join(commands(job) for job in workflow["jobs"].values())
    called = re.findall(r"^make (.*)$", run, re.MULTILINE)
    assert called
    for words in called:
        named = {word for word in words.split() if re.fullmatch("[a-z-]+", word)}
        assert named and named <= set(targets), words
    for script in re.findall(r"python (\S+\.py)", run):
        assert (ROOT / script).is_file(), script


def test_a_release_is_made_of_a_tag_after_all_other_jobs(workflow: dict[str, Any]) -> None:
    jobs = workflow["jobs"]
    assert jobs["release"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert needed(jobs, "release") == jobs.keys() - {"release"}
    writing = {name for name, job in jobs.items() if "write" in str(job.get("permissions"))}
    assert writing == {"release"} and workflow["permissions"] == {"contents": "read"}


def test_wheels_are_tried_on_every_python_that_they_are_for(workflow: dict[str, Any]) -> None:
    install = workflow["jobs"]["install"]
    versions = install["strategy"]["matrix"]["python"]
    assert versions == ["3.11", "3.12", "3.13", "3.14"]
    assert "csrc/try_wheel.py" in commands(install)
