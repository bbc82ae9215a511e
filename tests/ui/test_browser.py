"""The report in a real browser. `make test-browser` sets one up; without one these are skipped."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_train import model  # noqa: F401 - a fixture
from tests.tools.test_report import finished, page  # noqa: F401 - fixtures

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here; `make test-browser` installs it"),
]

# Runs after the page's own script and writes what it sees where --dump-dom shows it.
PROBE = """
<script>
addEventListener("load", () => {
  const seen = document.documentElement.dataset, canvas = document.getElementById("timeline");
  const picture = () => canvas.toDataURL();
  const inside = (part) => {
    const box = part.getBoundingClientRect();
    return { clientX: box.left + box.width * 0.6, clientY: box.top + box.height * 0.5,
             bubbles: true };
  };
  const tip = document.getElementById("tip");
  const before = picture();
  document.querySelector("[data-zoom='0.5']").click();
  seen.zoomed = picture() !== before;
  document.querySelector("[data-zoom='1000000']").click();
  seen.back = picture() === before;
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "+", bubbles: true }));
  seen.keys = picture() !== before;
  const loss = document.getElementById("loss");
  loss.dispatchEvent(new PointerEvent("pointermove", inside(loss)));
  seen.tip = tip.style.display === "block" ? tip.textContent : "";
  seen.lines = document.querySelectorAll("#loss polyline").length;
  seen.bands = document.querySelectorAll("#memory polygon").length;
  seen.loaded = performance.getEntriesByType("resource").length;
  seen.paper = getComputedStyle(document.body).backgroundColor;
  seen.wide = document.documentElement.scrollWidth <= innerWidth;
});
</script>
"""


def browse(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            *options,
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def seen(file: Path, *options: str) -> dict[str, str]:
    ended = browse(file, "--dump-dom", "--virtual-time-budget=4000", *options)
    assert "CONSOLE" not in ended.stderr, ended.stderr
    root = re.search(r"<html[^>]*>", ended.stdout)
    assert root is not None
    return dict(re.findall(r'data-(\w+)="([^"]*)"', root[0]))


@pytest.fixture
def probed(page: str, tmp_path: Path) -> Path:  # noqa: F811
    (tmp_path / "probed.html").write_text(page.replace("</body>", PROBE + "</body>"))
    return tmp_path / "probed.html"


@pytest.mark.parametrize(
    ("scheme", "dark"), [("preferredColorScheme=1", False), ("preferredColorScheme=0", True)]
)
@pytest.mark.parametrize("width", [1200, 420])
def test_in_a_browser(probed, scheme, dark, width):
    found = seen(probed, f"--blink-settings={scheme}", f"--window-size={width},900")
    assert int(found["drawn"]) == 7  # five curves, memory, timeline
    for what in ("zoomed", "back", "keys", "wide"):
        assert found[what] == "true", what
    assert found["tip"].startswith("step ") and "evaluation" in found["tip"]
    assert int(found["lines"]) == 2 and int(found["bands"]) > 3
    assert found["loaded"] == "0"
    red = int(re.findall(r"\d+", found["paper"])[0])
    assert (red < 60) is dark


def test_a_picture_of_it(probed, tmp_path):
    """Not empty: a blank page of this size compresses to a few kilobytes."""
    picture = tmp_path / "report.png"
    browse(probed, "--window-size=1200,2400", f"--screenshot={picture}")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 50_000
