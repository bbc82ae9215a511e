"""Hooks of the documentation site (mkdocs.yml).

The pages in docs/ and the Markdown files of the repository's root link to each other, and to
examples and tests, by relative paths. On the site, README.md is the start page, the other Markdown
files of the root are pages, and every other linked file is copied below `files/`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
START, INDEX, COPIES = "README.md", "index.md", "files/"
LINK = re.compile(r"(?<!\!)\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
# A list that follows its introduction without an empty line, which GitHub shows as a list.
TIGHT_LIST = re.compile(r"^(?![*|\s]|\d+\. |```)(.+)\n(?=\* |1\. )", re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the Markdown files of the root as pages, and copies of all other files they link to."""
    for path in sorted(ROOT.glob("*.md")):
        files.append(File.generated(config, page_name(path.name), abs_src_path=str(path)))
    texts = {path: path.read_text(encoding="utf-8") for path in pages()}
    for path, text in texts.items():
        for match in LINK.finditer(text):
            target = (path.parent / match[2]).resolve()
            if copied_to(target) and target.is_file() and copied_to(target) not in files.src_uris:
                files.append(File.generated(config, copied_to(target), abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Let links between the files of the repository lead to their places on the site."""
    source = Path(page.file.abs_src_path)
    here = posixpath.dirname(page.file.src_uri)
    markdown = TIGHT_LIST.sub(r"\1\n\n", markdown)

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if target.is_dir():  # a folder has no page
            return match[1]
        place = copied_to(target) or page_name(target.name)
        return f"[{match[1]}]({posixpath.relpath(place, here or '.')}{match[3] or ''})"

    markdown = markdown.replace("](docs/lanes.svg)", "](lanes.svg)")
    return LINK.sub(moved, markdown)


def pages() -> list[Path]:
    """Return the Markdown files of the site."""
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def page_name(name: str) -> str:
    """Return the name of a page on the site."""
    return INDEX if name == START else name


def copied_to(target: Path) -> str:
    """Return the place of a copy on the site, or "" for pages and for files in docs/."""
    if target.parent in (ROOT, ROOT / "docs") and target.suffix in (".md", ".svg", ".png"):
        return ""
    return COPIES + target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
