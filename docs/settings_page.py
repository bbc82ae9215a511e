"""Generate the tables of docs/configuration.md and docs/cli.md.

    python docs/settings_page.py        (also part of `make docs`)

The text between `<!-- settings SECTION -->` and `<!-- end -->` is replaced by the settings of that
section, as lohan/config.py declares them. The text between `<!-- options COMMAND -->` and
`<!-- end -->` is replaced by the options of that command, as `lohan COMMAND --help` shows them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from lohan.cli.main import app
from lohan.config import fields_of
from lohan.util.settings import FieldInfo

FOLDER = Path(__file__).parent
PAGES = (FOLDER / "configuration.md", FOLDER / "cli.md")
BLOCK = re.compile(r"(<!-- (settings|options) ([\w ]+) -->\n).*?(<!-- end -->)", flags=re.S)
ABSENT = "Default: "
EVERYWHERE = ("--help", "--json")


def filled(page: str) -> str:
    """Return the page with every table as the code declares it."""
    tables = {"settings": settings_table, "options": options_table}
    return BLOCK.sub(lambda match: match[1] + tables[match[2]](match[3]) + match[4], page)


def settings_table(section: str) -> str:
    """Return the table of one section: key, default, option of `lohan train`, and meaning."""
    options = options_of_train()
    rows = [
        f"| `{info.key}` | {default(info)} | {options.get(info.option, '')} | {meaning(info)} |"
        for info in fields_of()
        if info.section == ("" if section == "top" else section)
    ]
    head = ["| key | default | option | value and meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def options_table(words: str) -> str:
    """Return the table of a command. Options that are settings of a run are listed by name only."""
    options = [item for item in command_of(words).params if not set(item.opts) & set(EVERYWHERE)]
    settings = [item for item in options if is_setting(item)]
    rows = [f"| {written(item)} | {help_of(item)} |" for item in options if item not in settings]
    shared = ", ".join(map(written, settings))
    lines = ["| option | meaning |", "|---|---|", *rows] if rows else []
    if shared and words != "train":  # the page of settings lists those of `train`
        lines += ["", f"Settings of a run, as in [configuration](configuration.md): {shared}."]
    return "\n".join(lines).strip() + "\n"


def command_of(words: str) -> Any:
    """Return the command that the words name, such as `store rm`."""
    command: Any = typer.main.get_command(app)
    for word in words.split():
        command = command.commands[word]
    return command


def written(item: Any) -> str:
    """Return an option as it is written on the command line, or the name of an argument."""
    return ", ".join(
        f"`{name}`" for name in option_names(item)
    ) or f"`{item.metavar or item.name.upper()}`".replace("|", "\\|")


def help_of(item: Any) -> str:
    """Return the help text of an option, with its default and whether it is required."""
    text = str(item.help or "").replace("\\[", "[").replace("|", "\\|").replace("\n", " ").strip()
    if item.required:
        return f"{text} Required."
    shown = item.show_default
    if isinstance(shown, str):
        return f"{text} Default: {shown}."
    if shown and item.default not in (None, (), [], False) and not callable(item.default):
        return f"{text} Default: `{item.default}`."
    return text


def is_setting(item: Any) -> bool:
    """Return whether an option is a setting of a run, whose help text it then shares."""
    return any(
        info.option in item.opts and str(item.help).startswith(info.help_without_default)
        for info in fields_of()
    )


def options_of_train() -> dict[str, str]:
    """Return the options of `lohan train` that are settings, by their first name."""
    return {item.opts[0]: written(item) for item in command_of("train").params if is_setting(item)}


def option_names(item: Any) -> list[str]:
    """Return the long names of an option."""
    return [name for name in (*item.opts, *item.secondary_opts) if name.startswith("--")]


def default(info: FieldInfo) -> str:
    """Return the default of a setting in words or as a value."""
    if info.required:
        return "required"
    if ABSENT in info.help:
        return info.help.partition(ABSENT)[2].rstrip(".")
    if info.default in (None, ()):
        return "none"
    return f"`{str(info.default).lower()}`"


def meaning(info: FieldInfo) -> str:
    """Return the form of a setting's values and its help text, without the default."""
    return f"`{info.kind.metavar.replace('|', '`, `')}`. {info.help_without_default}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
