"""The documents are correct: their code runs, and commands and files exist."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from transformers import LlamaConfig

from lohan.cli.main import app
from lohan.config import fields_of
from lohan.model.machine import Profile
from lohan.model.shapes import Activation, BlockShape, ModelShape
from lohan.schedule.simulate import SiteWork, Traffic
from lohan.util.trace import Span, write_chrome_trace
from tests.support.model_folders import save_tokenizer
from tests.support.models import FAMILY_CONFIGS, GROUPED_SIZES, save_model

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
SHAPES = (Activation, BlockShape, ModelShape)


def fenced(text: str) -> list[tuple[str, str]]:
    """Return language and text of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.S | re.M)


def blocks(text: str, language: str) -> list[str]:
    return [body for name, body in fenced(text) if name == language]


def commands(text: str) -> list[list[str]]:
    """Return the words of every `lohan ...` in shell blocks and in code spans."""
    lines = "\n".join(blocks(text, "sh")).replace("\\\n", " ").splitlines()
    spans = re.findall(r"`(lohan [^`]+)`", text)
    actual = [shlex.split(line, comments=True) for line in (*lines, *spans)]
    return [words[1:] for words in actual if words[:1] == ["lohan"]]


def answered(text: str) -> list[tuple[str, str]]:
    """Return the first command of every shell block with an output block, and that output."""
    return [
        (body.splitlines()[0], answer)
        for (kind, body), (other, answer) in pairwise(fenced(text))
        if (kind, other) == ("sh", "text") and "--machine" in body.splitlines()[0]
    ]


HOW_IT_WORKS, PLANNING = (
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("how-it-works.md", "planning.md")
)


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        *answered(README),
        *answered(HOW_IT_WORKS),
        *(pytest.param(*found, marks=pytest.mark.slow) for found in answered(PLANNING)),
    ],
)
def test_forecasts_are_those_that_are_printed(command, answer, lohan):
    run = lohan(*shlex.split(command)[1:])
    assert run.code == 0, run.err
    missing = set(answer.splitlines()) - set(run.out.splitlines())
    assert not missing - {""}


@pytest.mark.parametrize("number", range(len(blocks(README, "python"))))
def test_python_blocks_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "my-model", FAMILY_CONFIGS["llama"])
    drive = tmp_path / "nvme0"
    drive.mkdir()
    code = blocks(README, "python")[number].replace('"/nvme0"', repr(str(drive)))
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "__main__"})
    assert (tmp_path / "my-model-tuned" / "config.json").is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_options_exist(document: Path) -> None:
    for words in commands(document.read_text(encoding="utf-8")):
        command: Any = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command, words = command.commands[words[0]], words[1:]
        named = words and not words[0].startswith("-")
        assert not (named and hasattr(command, "commands")), f"{document.name}: lohan {words}"
        existing = {"--help"} | {
            name for item in command.params for name in (*item.opts, *item.secondary_opts)
        }
        for word in words:
            if word.startswith("-"):
                assert word in existing, f"{document.name}: {word} is no option of this command"


def test_lone_options_are_those_of_train() -> None:
    """Options that the text names by themselves, such as `--host`."""
    command: Any = typer.main.get_command(app)
    existing = {
        name
        for sub in command.commands["train"].params
        for name in (*sub.opts, *sub.secondary_opts)
    }
    named = {span.split()[0] for span in re.findall(r"`(--[^`]+)`", README)}
    assert named and named <= existing


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.M))
        assert named <= targets, document.name


def test_tree_is_that_of_the_package() -> None:
    """A line for every package and the files of the root."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = next(block for block in blocks(page, "") if "csrc/" in block)
    actual = tree.partition("lohan/\n")[2].partition("\ncsrc/")[0]
    named = set(re.findall(r"^  (\w+)/ ", actual, flags=re.M))
    files = set(re.findall(r"(\w+)\.py", actual.splitlines()[0]))
    package = ROOT / "lohan"
    assert named == {path.parent.name for path in package.glob("*/__init__.py")}
    assert files == {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub forms them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_have_existing_targets(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", text):
        path = document.parent / target if target else document
        assert path.exists(), f"{document.name}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{document.name}: {target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert (ROOT / file).is_file(), f"{document.name}: {file}"
        if name:
            assert f"def {name}(" in (ROOT / file).read_text(), f"{document.name}: {file}::{name}"


def test_reference_pages_are_up_to_date() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "settings_page.py"))
    settings, options = (path.read_text(encoding="utf-8") for path in generator["PAGES"])
    for page in (settings, options):
        assert generator["filled"](page) == page, "run `make docs`"
    for info in fields_of():
        assert f"\n| `{info.key}` |" in settings, info.dotted
    commands = set(generator["command_of"]("").commands) - {"presets", "schema", "store"}
    assert commands == set(re.findall(r"<!-- options (\w+) -->", options))


def test_picture_is_drawn_from_a_trace(tmp_path: Path) -> None:
    result = runpy.run_path(str(ROOT / "docs" / "lanes_picture.py"))
    steps = [("F", 0, 1), ("B", 1, 3), ("F", 3, 4), ("B", 4, 6)]
    spans = [Span("compute", f"{kind}0", start, stop) for kind, start, stop in steps]
    write_chrome_trace(tmp_path / "trace.json", [*spans, Span("ssd", "W0.0", 5, 6)])
    picture = result["svg"](result["read"](tmp_path / "trace.json"), "a <title>")
    root = ElementTree.fromstring(picture)
    texts = [item.text for item in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <title>", "3.0 s", "100%", "33%"} <= set(texts)


def test_quickstart_works_as_printed(tmp_path, monkeypatch, lohan) -> None:
    """Its data, then every command of it in order; only the interrupt is left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = LlamaConfig(**{**GROUPED_SIZES, "vocab_size": 264, "max_position_embeddings": 256})
    save_model(tmp_path / "my-model", config)
    save_tokenizer(tmp_path / "my-model")
    (tmp_path / "examples.jsonl").write_text(blocks(QUICKSTART, "json")[0], encoding="utf-8")
    printed = commands("\n".join(f"```sh\n{block}```" for block in blocks(QUICKSTART, "sh")))
    assert [words[0] for words in printed[:4]] == ["doctor", "plan", "train", "resume"]
    for words in printed:
        ended = lohan(*words)
        allowed = {0, 1} if words[0] == "doctor" else {0}  # this machine may lack something
        assert ended.code in allowed, (words, ended)
    result = {"my-run/report.html", "my-run/model/config.json", "my-run/trace.json", "tuned"}
    assert all((tmp_path / name).exists() for name in result)
    rows = (tmp_path / "my-run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 31))


def messages() -> list[str]:
    """Return the texts in the package, with a mark where a value is inserted."""
    collected = []
    for path in (ROOT / "lohan").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                collected.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                collected.append(node.value)
    return collected


def test_messages_of_the_troubleshooting_page_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    reported = re.findall(r"^\| `([^`]+)` \|", page, flags=re.M)
    assert len(reported) > 20
    existing = messages()
    for message in reported:
        parts = [part for part in message.split("…") if part.strip()]
        assert any(all(part in text for part in parts) for text in existing), message


def test_nouns_are_in_the_modules_that_the_design_names() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.partition("| noun | module |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines()[2:]]
    assert len(rows) > 10
    for nouns, modules in rows:
        files = [name.replace(".", "/") for name in re.findall(r"`([\w.]+)`", modules)]
        actual = [ROOT / "lohan" / f"{name}.py" for name in files]
        texts = [
            part.read_text(encoding="utf-8")
            for file in actual
            for part in ([file] if file.is_file() else file.with_suffix("").glob("*.py"))
        ]
        for noun in re.findall(r"`(\w+)`", nouns):
            assert any(re.search(rf"^(class )?{noun}\b", text, re.M) for text in texts), noun


def test_symbols_of_the_paper_are_explained() -> None:
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    section = page.partition("## The paper's symbols")[2].partition("\n## ")[0]
    owners = {kind.__name__: kind for kind in (Traffic, SiteWork, Profile, *SHAPES)}
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", section)
    assert len(named) > 20
    for owner, name in named:
        fields = getattr(owners[owner], "__dataclass_fields__", {})
        assert name in fields or hasattr(owners[owner], name), f"{owner}.{name}"
