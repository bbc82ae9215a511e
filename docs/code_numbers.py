"""Numbers about the package, for docs/design.md: python docs/code_numbers.py"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "lohan"


def main() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    modules = [path for path in files if path.name != "__init__.py"]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    functions = [
        (node.end_lineno - node.lineno + 1, f"{path.relative_to(PACKAGE)}: {node.name}")
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno
    ]
    small = sum(lines[path] < 40 for path in modules)
    root = [path.name for path in files if path.parent == PACKAGE]
    largest = max(modules, key=lambda path: lines[path])
    print(f"packages               {sum(path.name == '__init__.py' for path in files) - 1}")
    print(f"modules                {len(modules)}, {small} under 40 lines")
    print(f"files at the root      {len(root)}: {', '.join(root)}")
    print(f"lines                  {sum(lines.values()):,}")
    print(f"largest module         {largest.relative_to(PACKAGE)}, {lines[largest]} lines")
    for count, name in sorted(functions, reverse=True)[:3]:
        print(f"longest functions      {name}, {count} lines")


if __name__ == "__main__":
    main()
