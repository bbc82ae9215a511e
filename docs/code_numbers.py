"""Numbers about the package, and the map of its modules in docs/design.md.

python docs/code_numbers.py           the numbers
python docs/code_numbers.py --write   and both into docs/design.md, between their markers
"""

from __future__ import annotations

import ast
import re
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
        DESIGN.write_text(write(text, "numbers", table), encoding="utf-8")


if __name__ == "__main__":
    main()
