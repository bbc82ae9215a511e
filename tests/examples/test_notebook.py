"""examples/gpu_proof.ipynb runs from top to bottom on the CPU; cells for a GPU skip themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support import HANG_S

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "gpu_proof.ipynb"


def test_notebook_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)


def test_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=HANG_S, resources=resources).execute()
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if cell.cell_type == "code"
    )
    assert "skipped: this machine has no GPU" in printed
    losses = [re.findall(r"\d+\.\d+", line) for line in printed.splitlines() if "losses [" in line]
    assert len(losses) == 2 and len(losses[0]) == 5
    assert [float(loss) for loss in losses[1]] == pytest.approx(
        list(map(float, losses[0])), abs=1e-4
    )
    assert re.search(r"LoHan .*s per step", printed) and not list(tmp_path.glob("*.json"))
