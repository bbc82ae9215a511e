"""What the documents say is true: code runs, commands and files exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from lohan.cli import app
from lohan.config import Config, fields_of
from tests.tiny_models import CONFIGS, save_model

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLI_PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.S | re.M)
    return [body for name, body in fenced if name == language]


def commands(text: str) -> list[list[str]]:
    """Words of every `lohan ...` in shell blocks and in code spans."""
    lines = "\n".join(blocks(text, "sh")).replace("\\\n", " ").splitlines()
    spans = re.findall(r"`(lohan [^`]+)`", text)
    found = [shlex.split(line, comments=True) for line in (*lines, *spans)]
    return [words[1:] for words in found if words[:1] == ["lohan"]]


@pytest.mark.parametrize("number", range(len(blocks(README, "python"))))
def test_python_blocks_run(number: int, tmp_path: Path) -> None:
    save_model(tmp_path / "my-model", CONFIGS["llama"])
    drive = tmp_path / "nvme0"
    drive.mkdir()
    code = blocks(README, "python")[number].replace('"/nvme0"', repr(str(drive)))
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "my-model-tuned" / "config.json").is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_options_exist(document: Path) -> None:
    for words in commands(document.read_text(encoding="utf-8")):
        command: Any = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command, words = command.commands[words[0]], words[1:]
        named = words and not words[0].startswith("-")
        assert not (named and hasattr(command, "commands")), f"{document.name}: lohan {words}"
        known = {"--help"} | {
            name for item in command.params for name in (*item.opts, *item.secondary_opts)
        }
        for word in words:
            if word.startswith("-"):
                assert word in known, f"{document.name}: {word} is no option of this command"


def test_lone_options_are_those_of_train() -> None:
    """Options that the text names by themselves, such as `--host`."""
    command: Any = typer.main.get_command(app)
    known = {
        name
        for sub in command.commands["train"].params
        for name in (*sub.opts, *sub.secondary_opts)
    }
    named = {span.split()[0] for span in re.findall(r"`(--[^`]+)`", README)}
    assert named and named <= known


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.M))
        assert named <= targets, document.name


def test_files_of_the_tree_exist() -> None:
    tree = next(block for block in blocks(README, "") if "csrc/" in block)
    folder, found = [], 0
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        if depth > 2:  # the text of the line above
            continue
        for word in line.split():
            if word.endswith("/") and word == line.split()[0]:
                folder = [*folder[:depth], word]
                assert (ROOT / "".join(folder)).is_dir(), line
            elif re.fullmatch(r"\w+\.py", word):
                assert (ROOT / "".join(folder[:depth]) / word).is_file(), line
                found += 1
            else:
                break
    assert found > 30


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / target).exists(), f"{document.name}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert (ROOT / file).is_file(), f"{document.name}: {file}"
        if name:
            assert f"def {name}(" in (ROOT / file).read_text(), f"{document.name}: {file}::{name}"


def test_settings_page_is_complete(tmp_path: Path) -> None:
    rows = "\n".join(line.split("|")[1] for line in CLI_PAGE.splitlines() if line.startswith("|"))
    for info in fields_of():
        assert f"`{info.key}`" in rows, f"docs/cli.md lacks {info.dotted}"
    for block in blocks(CLI_PAGE, "toml"):
        Config.from_mapping(tomllib.loads(block), base_dir=tmp_path)
