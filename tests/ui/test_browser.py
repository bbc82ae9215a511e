"""The pages in a real browser: a training that is started, watched, stopped, resumed and tried.

`make test-browser` installs what this needs; without a browser the tests are skipped. With
PICTURES=DIR, pictures of every page are written there, in a wide and in a narrow window, light and
dark.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from lohan.train.run_folder import RunFolder, eval_rows, step_rows
from tests.support.training_runs import (
    HOSTILE_TEXT,
    TEXT_ROWS,
    finished_fixture,  # noqa: F401 - a fixture
    page_fixture,  # noqa: F401 - a fixture
    word_model_fixture,  # noqa: F401 - a fixture
    write_rows,
    write_run_folder,
)

webdriver = pytest.importorskip("selenium.webdriver")
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None,
        reason="no Chromium with its driver here; `make test-browser` installs them",
    ),
]
PATIENCE_S = 240.0
STEPS = 40
SIZES = {"wide": 1200, "narrow": 420}


class Window:
    """A window of the browser, and what its pages show."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.resize("wide", dark=False)

    def resize(self, size: str, *, dark: bool) -> None:
        metrics = {"width": SIZES[size], "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, address: str) -> None:
        self.driver.get("about:blank")
        self.driver.get(address)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def until(self, what: Callable[[], Any], message: str) -> Any:
        end = time.monotonic() + PATIENCE_S
        while not (actual := what()):
            assert time.monotonic() < end, f"{message}; the page shows:\n{self.text()[:3000]}"
            time.sleep(0.3)
        return actual

    def shows(self, words: str) -> None:
        self.until(lambda: words in self.text(), f"no {words!r}")

    def click(self, words: str) -> None:
        script = """const found = [...document.querySelectorAll("button, a.button")].find((one) =>
          one.textContent === arguments[0] && !one.disabled && one.offsetParent);
          if (found) found.click();
          return Boolean(found);"""
        self.until(lambda: self.run(script, words), f"no button {words!r}")

    def fill(self, values: dict[str, str]) -> None:
        for name, value in values.items():
            script = """const field = document.getElementById(arguments[0]);
              field.value = arguments[1];
              field.dispatchEvent(new Event("input", { bubbles: true }));"""
            self.run(script, name, value)

    def points(self, chart: str) -> dict[str, list[Any]]:
        """Return number, last step and last value of each curve that a chart shows."""
        script = 'return document.querySelector(`[data-chart="${arguments[0]}"]`)?.dataset.points'
        actual = json.loads(self.run(script, chart) or "[]")
        return {name: rest for name, *rest in actual}

    def errors(self) -> list[str]:
        """Return what the browser reported; refused settings (400) are part of a form's work."""
        logs = self.driver.get_log("browser")
        return [row["message"] for row in logs if "status of 400" not in row["message"]]

    def is_as_wide_as_the_window(self) -> bool:
        return bool(self.run("return document.documentElement.scrollWidth <= innerWidth"))

    def picture(self, name: str, *, most: int = 1500) -> bytes:
        height = min(most, self.run("return document.documentElement.scrollHeight"))
        clip = {"x": 0, "y": 0, "width": self.run("return innerWidth"), "height": height}
        taken = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot",
            {"format": "png", "captureBeyondViewport": True, "clip": {**clip, "scale": 1}},
        )
        png = base64.b64decode(taken["data"])
        if folder := os.environ.get("PICTURES"):
            Path(folder).mkdir(exist_ok=True)
            (Path(folder) / f"{name}.png").write_bytes(png)
        return png

    def pictures(self, name: str) -> None:
        """Check the page in both sizes and both color schemes."""
        for size in SIZES:
            for dark in (False, True):
                self.resize(size, dark=dark)
                time.sleep(0.5)
                png = self.picture(f"ui-{name}-{size}-{'dark' if dark else 'light'}")
                # A blank page of this size compresses to a few kilobytes.
                assert len(png) > 12_000
                assert self.is_as_wide_as_the_window(), f"{name} is wider than a {size} window"
                paper = self.run("return getComputedStyle(document.body).backgroundColor")
                assert (int(re.findall(r"\d+", paper)[0]) < 60) is dark
        self.resize("wide", dark=False)


@pytest.fixture(scope="module")
def window() -> Iterator[Window]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield Window(driver)
    driver.quit()


@pytest.fixture(scope="module")
def root(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(model, folder / "model")
    write_rows(folder / "data.jsonl", TEXT_ROWS)
    return folder


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "lohan", "ui", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split("open ")[1].strip()
        server.send_signal(signal.SIGINT)


# -- A training ------------------------------------------------------------------------------------


def test_training_from_the_form_to_the_answer(window: Window, address: str, root: Path) -> None:
    """What a page shows of a running training is what its metrics.jsonl holds."""
    window.open(f"{address}#/new")
    window.shows("Choose a name, a model and data")
    window.fill(
        {
            "new-name": "my-run",
            "new-model": "model",
            "new-data": "data.jsonl",
            "new-train-lr": "fast",
        }
    )
    window.shows('[train] lr: got text "fast", wants a number above 0')
    settings = {"lr": "1e-3", "batch": "2", "seq": "16", "steps": str(STEPS)}
    window.fill({f"new-train-{key}": value for key, value in settings.items()})
    more = {"budget-host": "300KiB", "eval-split": "0.2", "eval-every": "10"}
    window.fill({f"new-{key}": value for key, value in more.items()})
    window.shows('host = "300KiB"')
    window.click("Check data and plan")
    window.until(
        lambda: window.run('return document.querySelector("[data-done], .problem")'), "no check"
    )
    text = window.text()
    assert "9 examples" in text and "first example" in text and f"{STEPS} steps" in text
    window.pictures("new")
    window.click("Start training")

    window.shows("my-run")
    folder = RunFolder(root / "my-run")
    window.until(lambda: "running" in window.text(), "it does not run")
    window.open(f"{address}#/run?name=my-run")
    shown = window.until(lambda: window.points("loss"), "no loss")
    rows = step_rows(folder)
    count, step, loss = shown["loss"] if "loss" in shown else shown["loss, smoothed"]
    assert step == count <= len(rows)
    assert "loss" not in shown or loss == rows[step - 1]["loss"]

    window.click("Stop")
    window.shows("It finishes its step, commits and ends")
    window.until(lambda: re.search(r"\bstopped\b|\bfinished\b", window.text()), "it goes on")
    window.until(lambda: len(step_rows(folder)) == folder_step(window), "another step")
    if "stopped" in window.text():
        window.click("Resume")
        window.shows("It continues from its last committed step")
    window.shows("all steps are done")
    window.until(lambda: folder_step(window) == STEPS, "the last step is missing")

    rows = step_rows(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    speed, rate, norm = (next(iter(window.points(n).values())) for n in ("speed", "rate", "norm"))
    assert speed == [STEPS, STEPS, rows[-1]["tokens_per_s"]]
    assert rate == [STEPS, STEPS, rows[-1]["lr"]] and norm[2] == rows[-1]["grad_norm"]
    last = eval_rows(folder)[-1]
    assert window.points("loss")["evaluation"] == [4, STEPS, last["eval_loss"]]
    assert f"step {STEPS}/{STEPS}" in window.text()
    window.pictures("run")

    window.click("Export")
    window.until(lambda: (root / "my-run-export" / "config.json").exists(), "no export")
    window.open(f"{address}#/try?{urlencode({'name': 'my-run', 'prompt': 'the cat', 'tokens': 4})}")
    window.click("Answer")
    script = 'return document.querySelectorAll("[data-answer][data-done], .problem").length === 2'
    window.until(lambda: window.run(script), "no answers")
    script = 'return [...document.querySelectorAll("[data-answer]")].map((one) => one.textContent)'
    before, after = window.run(script)
    command = [sys.executable, "-m", "lohan", "generate", str(root / "my-run"), "--json"]
    command += ["--prompt", "the cat", "--max-new-tokens", "4"]
    reported = subprocess.run(command, capture_output=True, check=True, cwd=root)
    assert json.loads(reported.stdout)[0]["text"] == after
    assert before != "computing \u2026"
    window.pictures("try")
    window.open(f"{address}#/runs")
    window.shows("finished")
    window.pictures("runs")
    compare_with_second_run(window, address, root)
    assert window.errors() == []


def compare_with_second_run(window: Window, address: str, root: Path) -> None:
    """Repeat the training with a lower learning rate, and compare both runs on one page."""
    settings = (root / "my-run.toml").read_text().replace("my-run", "lower-rate")
    settings, changed = re.subn(r"(?m)^lr = .*$", "lr = 3e-4", settings)
    assert changed == 1
    (root / "lower-rate.toml").write_text(settings)
    command = [sys.executable, "-m", "lohan", "train", "--config", "lower-rate.toml"]
    subprocess.run(command, check=True, cwd=root, capture_output=True)
    window.open(f"{address}#/runs")
    window.shows("lower-rate")
    for name in ("my-run", "lower-rate"):
        window.run("document.querySelector(arguments[0]).click()", f'[aria-label="compare {name}"]')
    window.click("Compare 2 runs")
    window.until(lambda: len(window.points("rate")) == 2, "no learning rates of two runs")
    for chart, key in {"rate": "lr", "norm": "grad_norm", "speed": "tokens_per_s"}.items():
        for name, points in window.points(chart).items():
            assert points == [STEPS, STEPS, step_rows(RunFolder(root / name))[-1][key]]
    window.pictures("two")


def folder_step(window: Window) -> int:
    return int(window.run('return document.getElementById("page").dataset.step') or 0)


# -- Other pages -----------------------------------------------------------------------------------


def test_hostile_names_are_text(window: Window, address: str, root: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    run = write_run_folder(root / "hostile" / name, 1, 2, 3)
    settings = {"step": 1, "samples": [{"prompt": HOSTILE_TEXT, "text": HOSTILE_TEXT}]}
    run.samples_file.write_text(json.dumps(settings) + "\n")
    try:
        window.open(f"{address}#/runs")
        window.shows(name)
        assert window.run('return document.querySelectorAll("main img").length') == 0
        window.open(f"{address}#/run?{urlencode({'name': f'hostile/{name}'})}")
        window.shows("onerror=alert(1)>\u202e")
        assert window.run('return document.querySelectorAll("main img, main script").length') == 0
        assert window.points("loss") == {"loss": [3, 3, 2.0 / 3]}
    finally:
        shutil.rmtree(root / "hostile")
    assert window.errors() == []


def test_plan_is_in_the_address(window: Window, address: str) -> None:
    query = urlencode({"model": "qwen3-0.6b", "machine": "rtx4090", "batch": 4, "seq": 256})
    window.open(f"{address}#/plan?{query}")
    window.shows("It fits")
    planned = 'return document.getElementById("page").dataset.planned'
    speed = window.until(lambda: window.run(planned), "no plan")
    window.shows("tokens/s")
    window.fill({"plan-batch": "100000"})
    window.shows("It does not fit")
    assert "batch=100000" in window.run("return location.hash")
    window.fill({"plan-batch": "4"})
    assert window.until(lambda: window.run(planned), "no plan") == speed
    script = 'return document.querySelector("[data-done] table.models")'
    window.until(lambda: window.run(script), "no table of models")
    assert "gpt-412b" in window.text()
    window.pictures("plan")
    assert window.errors() == []


def test_report_is_one_file(window: Window, page: str, tmp_path: Path) -> None:
    """It draws every chart, loads nothing, and its timeline answers to buttons and keys."""
    (tmp_path / "report.html").write_text(page)
    window.open((tmp_path / "report.html").as_uri())
    window.until(lambda: window.run("return document.documentElement.dataset.drawn"), "no charts")
    assert window.run("return performance.getEntriesByType('resource').length") == 0
    assert set(window.points("loss")) == {"loss", "evaluation"}
    lines = window.run("return document.querySelectorAll('[data-chart=loss] polyline').length")
    bands = window.run("return document.querySelectorAll('[data-chart=memory] polygon').length")
    assert lines == 2 and bands > 3
    picture = "return document.querySelector('canvas').toDataURL()"
    whole = window.until(lambda: window.run(picture), "no timeline")
    window.click("zoom in")
    assert window.run(picture) != whole
    window.click("all")
    assert window.run(picture) == whole
    script = """const loss = document.querySelector("[data-chart=loss]");
      const box = loss.getBoundingClientRect();
      loss.dispatchEvent(new PointerEvent("pointermove", { bubbles: true,
        clientX: box.left + box.width * 0.6, clientY: box.top + box.height * 0.5 }));
      return document.getElementById("tip").textContent;"""
    tip = window.run(script)
    assert tip.startswith("step ") and "evaluation" in tip
    window.pictures("report")
    assert window.errors() == []
