"""A finished run, its report, and the elements of the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lohan.cli import main
from lohan.cli.tools import report as report_command
from tests.support.word_model import (
    TEXTS,
    model_fixture,  # noqa: F401 - fixtures
    write_rows,
)


@pytest.fixture(name="finished", scope="module")
def finished_fixture(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a training with evaluations, samples and a trace."""
    place = tmp_path_factory.mktemp("report")
    data = write_rows(place / "data.jsonl", TEXTS)
    words = [
        "lohan",
        "train",
        "--model",
        model,
        "--data",
        data,
        "--out",
        place / "run",
        "--host",
        "300KiB",
        "--steps",
        8,
        "--batch",
        2,
        "--seq",
        16,
        "--lr",
        "1e-3",
        "--trace",
        "--eval-split",
        0.2,
        "--eval-every",
        4,
        "--sample-prompts",
        "the cat",
        "--sample-tokens",
        3,
        "--no-export",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [str(word) for word in words])
        try:
            main.main()
        except SystemExit as end:
            assert not end.code
    return place / "run"


@pytest.fixture(name="page", scope="module")
def page_fixture(finished: Path) -> str:
    """Its report, made once."""
    target = finished.parent / "report.html"
    report_command([finished], target)
    assert target.stat().st_mode & 0o077 == 0  # readable by the owner only
    return target.read_text(encoding="utf-8")


def texts(value: object) -> Iterator[str]:
    """Yield the texts of a view. The parts of a cell are joined, as on the page."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from texts(inner)
    elif isinstance(value, list) and any("code" in v for v in value if isinstance(v, dict)):
        yield "".join(v["code"] if isinstance(v, dict) else str(v) for v in value)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
    elif isinstance(value, str):
        yield value


class Elements(HTMLParser):
    """Tags with attributes, visible text, and the data of the script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside: list[str] = []
        self.raw: dict[str, str] = {}
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self._inside.append(dict(attributes).get("id") or tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._inside.pop()

    def handle_data(self, data):
        if self._inside:
            self.raw[self._inside[-1]] = self.raw.get(self._inside[-1], "") + data
        else:
            self.text += data

    @property
    def data(self) -> dict:
        """The view of the first run."""
        return json.loads(self.raw["data"])["runs"][0]

    @property
    def shown(self) -> str:
        """All texts of the first run, a cell or a line each."""
        return "\n".join(texts(self.data))
