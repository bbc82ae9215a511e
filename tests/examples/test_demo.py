"""The demo end to end on a small random model, and its output."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from examples import demo_model
from lohan.store.files import StoreLock
from tests.support import HANG_S

EXAMPLES = Path(demo_model.__file__).parent


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("examples.demo")


def run_demo(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_S)


def test_demo_on_the_random_model_beside_the_rest_of_an_earlier_one(tmp_path: Path) -> None:
    folder, _ = demo_model.fallback_folder(tmp_path / "models", text_bytes=60_000, vocab_size=400)
    created = (folder / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "run" / "store").mkdir(parents=True)
    (tmp_path / "run" / ".lohan-demo").touch()
    for name in ("run.toml", "metrics.jsonl", "store/manifest.json"):
        (tmp_path / "run" / name).write_text('{"step": 7}\n')
    result = run_demo(tmp_path, "--random", "--steps", "3")
    assert result.returncode == 0, result.stdout + result.stderr
    log = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1, 2, 3]
    shown = result.stdout
    assert "This is not a pre-trained model" in shown
    assert re.search(r"\d\.\d\d -> \d\.\d\d", shown)
    assert re.search(r"peak of the process +\d+\.\d\d [GM]iB", shown)
    assert shown.count("before  ") == shown.count("after   ") == 3
    assert max(map(len, shown.replace(str(tmp_path), "demo-run").splitlines())) <= 80
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert (folder / "model.safetensors").stat().st_mtime_ns == created, "the cached model is kept"


def test_a_failed_training_is_one_message(tmp_path: Path) -> None:
    folder, _ = demo_model.fallback_folder(tmp_path / "models", text_bytes=60_000, vocab_size=400)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    result = run_demo(tmp_path, "--random", "--steps", "1")
    assert result.returncode == 2
    assert "Traceback" not in result.stdout + result.stderr


def test_a_run_in_use_is_not_removed(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "run" / "store" / "lock"
    kept.parent.mkdir(parents=True)
    with pytest.raises(demo.StoreError, match="is not a demo's"):  # whoever has made it
        demo.make_way(tmp_path / "run")
    (tmp_path / "run" / demo.MARK).touch()
    lock = StoreLock([kept.parent])
    with pytest.raises(demo.StoreError, match=f"in use by process {os.getpid()}"):
        demo.make_way(tmp_path / "run")
    assert kept.exists()
    lock.release()
    demo.make_way(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [demo.MARK]


def test_sparkline(demo: ModuleType) -> None:
    assert demo.sparkline([8.0, 4.5, 1.0]) == "█▅▁"
    assert demo.sparkline([2.0, 2.0]) == "▁▁"
    assert demo.sparkline([float(100 - i) for i in range(100)], width=8) == "█▇▆▅▄▃▂▁"


def test_the_demo_imports_no_torch(demo: ModuleType) -> None:
    """Its own memory must not blur the figures of the process that trains."""
    code = "import sys; import demo; assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
