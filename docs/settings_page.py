"""The tables of docs/configuration.md, from the config classes.

    python docs/settings_page.py        (also part of `make docs`)

Between `<!-- settings SECTION -->` and `<!-- end -->` everything is replaced by that section's
table: key, default, option of `lohan train` and meaning, as lohan/config.py declares them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from lohan.cli.main import app
from lohan.config import fields_of
from lohan.util.settings import FieldInfo

PAGE = Path(__file__).with_name("configuration.md")
BLOCK = re.compile(r"(<!-- settings (\w+) -->\n).*?(<!-- end -->)", flags=re.S)
ABSENT = "Not given: "


def filled(page: str) -> str:
    """Return the page with all tables regenerated from the settings classes."""
    return BLOCK.sub(lambda match: match[1] + table(match[2]) + match[3], page)


def table(section: str) -> str:
    options = options_by_help()
    rows = [
        f"| `{info.key}` | {default(info)} | {options.get(info.help, '')} | {meaning(info)} |"
        for info in fields_of()
        if info.section == ("" if section == "top" else section)
    ]
    head = ["| key | default | option | value and meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def options_by_help() -> dict[str, str]:
    """Options of `lohan train`; each has the help text of its field."""
    command: Any = typer.main.get_command(app)
    found = command.commands["train"].params
    return {item.help: ", ".join(f"`{n}`" for n in option_names(item)) for item in found}


def option_names(item: Any) -> list[str]:
    return [name for name in (*item.opts, *item.secondary_opts) if name.startswith("--")]


def default(info: FieldInfo) -> str:
    if info.required:
        return "required"
    if ABSENT in info.help:
        return info.help.partition(ABSENT)[2].rstrip(".")
    if info.default in (None, ()):
        return "none"
    return f"`{str(info.default).lower()}`"


def meaning(info: FieldInfo) -> str:
    text = info.help.partition(ABSENT)[0].strip()
    return f"`{info.kind.metavar.replace('|', '`, `')}`. {text}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
