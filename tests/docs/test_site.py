"""The documentation site: it builds without a warning, its links work, and it needs no network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support import HANG_S

ROOT = Path(__file__).resolve().parents[2]
LOADED = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\bhref="([^"]+)"'
)
LINKED = re.compile(r'<a\b[^>]*\bhref="([^"]+)"')


def test_site_builds_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert built.returncode == 0, built.stderr
    pages = sorted(site.rglob("*.html"))
    assert {path.parent.name for path in pages} >= {"quickstart", "CONTRIBUTING", "models"}
    for page in pages:
        html = page.read_text(encoding="utf-8")
        for match in LOADED.finditer(html):
            check_local(page, match[1] or match[2], site)
        for target in LINKED.findall(html):
            if not urlsplit(target).scheme:
                check_local(page, target, site)


def check_local(page: Path, target: str, site: Path) -> None:
    """Fail unless `target` is a file of the site, with an element of that id if it names one."""
    parts = urlsplit(target)
    assert not parts.scheme and not parts.netloc, f"{page}: {target} is on the network"
    path = site / parts.path[1:] if parts.path.startswith("/") else page.parent / parts.path
    path = Path(unquote(str(path))) if parts.path else page
    path = path / "index.html" if path.is_dir() else path
    assert path.is_file(), f"{page.relative_to(site)}: {target}"
    if parts.fragment and path.suffix == ".html":
        name = re.escape(unquote(parts.fragment))
        assert re.search(rf'\bid="{name}"', path.read_text(encoding="utf-8")), f"{page}: {target}"
