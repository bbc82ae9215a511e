"""Numbers about the package, and the map of its modules in docs/design.md.

python docs/code_numbers.py           the numbers
python docs/code_numbers.py --write   and both into docs/design.md, between their markers, with
                                      what became of its lines, from the history in git
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "lohan"
DESIGN = PACKAGE.parent / "docs" / "design.md"
ORDER = (
    "util", "store", "model", "schedule", "planner", "device", "capture", "checkpoint", "engine",
    "data", "train", "tools", "hf", "cli",
)  # fmt: skip


def module_map() -> str:
    rows = [("lohan/", PACKAGE), *((f"lohan/{name}/", PACKAGE / name) for name in ORDER)]
    lines = []
    for title, folder in rows:
        names = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("__"))
        lines.append(f"{title:18} {', '.join(names)}")
    return "\n".join(lines)


def numbers() -> list[tuple[str, str]]:
    files = sorted(PACKAGE.rglob("*.py"))
    modules = [path for path in files if path.name != "__init__.py"]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    functions = sorted(
        (
            (node.end_lineno - node.lineno + 1, f"{path.relative_to(PACKAGE)}: {node.name}")
            for path in files
            for node in ast.walk(ast.parse(texts[path]))
            if isinstance(node, ast.FunctionDef) and node.end_lineno
        ),
        reverse=True,
    )
    root = [path.name for path in files if path.parent == PACKAGE]
    largest = max(modules, key=lambda path: lines[path])
    longest = "; ".join(f"{name}, {count} lines" for count, name in functions[:3])
    return [
        ("packages", str(sum(path.name == "__init__.py" for path in files) - 1)),
        ("modules", f"{len(modules)}, {sum(lines[path] < 40 for path in modules)} under 40 lines"),
        ("files at the root", f"{len(root)}: {', '.join(root)}"),
        ("lines", f"{sum(lines.values()):,}"),
        ("largest module", f"{largest.relative_to(PACKAGE)}, {lines[largest]} lines"),
        ("longest functions", longest),
        ("functions over 60 lines", str(sum(count > 60 for count, _ in functions))),
    ]


REORGANISED = "7c8e3e5"  # before 241 modules were put into packages
MOVED_OUT = 529  # lines of a list that is a text file now: no saving


def account() -> list[tuple[str, str]]:
    """Lines of the package since then, by commits that took some away and those that added."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=PACKAGE.parent, capture_output=True, text=True)
        return done.stdout

    log = git("log", "--no-merges", "--numstat", "--format=@%h", f"{REORGANISED}..", "--", "lohan")
    changes = []
    for commit in log.split("@")[1:]:
        rows = [row.split("\t") for row in commit.splitlines() if row.endswith(".py")]
        changes.append(sum(int(added) - int(gone) for added, gone, _ in rows))
    less, more = [n for n in changes if n < 0], [n for n in changes if n > 0]
    files = sorted(PACKAGE.rglob("*.py"))
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    since = set(git("rev-list", f"{REORGANISED}..").split())
    new = [
        path
        for path in files
        if lines[path] > 60
        and git("log", "--follow", "--format=%H", "--", str(path)).split()[-1:][0] in since
    ]
    counts = git("grep", "-c", "", REORGANISED, "--", "lohan/*.py").splitlines()
    before = [int(row.rpartition(":")[2]) for row in counts]
    names = ", ".join(str(path.relative_to(PACKAGE).with_suffix("")) for path in new)
    now = sum(lines.values())
    return [
        ("before", f"{sum(before):,} lines, {len(before)} files"),
        ("smaller by", f"{-sum(less):,} in {len(less)} commits ({MOVED_OUT} of them moved out)"),
        ("larger by", f"{sum(more):,} in {len(more)} commits: features, and their messages"),
        ("today", f"{now:,} lines, {len(files)} files"),
        ("in modules that were not there", f"{sum(lines[path] for path in new):,}: {names}"),
    ]


def write(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    return re.sub(
        f"{begin}.*?{end}", lambda _: f"{begin}\n{content}\n{end}", text, count=1, flags=re.DOTALL
    )


def main() -> None:
    found = numbers()
    for name, value in found:
        print(f"{name:24} {value}")
    if "--write" in sys.argv:
        text = DESIGN.read_text(encoding="utf-8")
        table = "\n".join(["| what | today |", "|---|---|", *(f"| {n} | {v} |" for n, v in found)])
        text = write(text, "modules", f"```\n{module_map()}\n```")
        text = write(text, "numbers", table)
        since = [f"| {name} | {value} |" for name, value in account()]
        text = write(text, "account", "\n".join(["| lines | |", "|---|---|", *since]))
        DESIGN.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
