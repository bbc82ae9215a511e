"""The folders that the pages may read and write."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.config import Config, fields_of
from lohan.errors import ConfigError
from lohan.train.run_folder import RunFolder
from lohan.util.hub import cached_folder
from lohan.util.settings import Source

WORK = ".lohan-ui"  # folder below the root for logs of started processes


@dataclass(frozen=True)
class Places:
    """The folder that the pages show, and other folders that `--also` names."""

    root: Path
    others: tuple[Path, ...] = ()

    @classmethod
    def of(cls, root: Path, others: tuple[Path, ...] = ()) -> Places:
        for folder in (root, *others):
            if not folder.is_dir():
                raise ConfigError(f"{folder}: no such folder; create it, or give another")
        return cls(root.resolve(), tuple(folder.resolve() for folder in others))

    @property
    def work(self) -> Path:
        return self.root / WORK

    def path(self, text: str | Path, what: str) -> Path:
        """Return the absolute path for `text`; relative paths begin at the root.

        Raise ConfigError if the path is outside of these folders. Links are resolved first, so a
        link in a folder cannot give access to files outside of it. `what` names the path in the
        message.
        """
        try:
            joined = self.root / Path(text).expanduser()
            path = joined.resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"{what}: {str(text)!r} is not a path ({error})") from None
        for place in (self.root, *self.others):
            if place == path or place in path.parents:
                return path
        parent = path if path.is_dir() else path.parent
        raise ConfigError(
            f"{what}: {text} is outside {self.root}, the folder of these pages; move it "
            f"there, or start `lohan ui {shlex.quote(str(self.root))} --also "
            f"{shlex.quote(str(parent))}`"
        )

    def run(self, name: str) -> RunFolder:
        """Return the run folder with this name, as the list of runs shows it."""
        folder = RunFolder(self.path(name, "run"))
        if not folder.config_file.is_file():
            raise ConfigError(f"run: no run {name!r} in {self.root}; reload the list of runs")
        return folder

    def check(self, config: Config) -> None:
        """Raise ConfigError if a setting names a file or folder outside of these folders.

        Models in the cache of the hub are allowed.
        """
        for info in fields_of():
            table = getattr(config, info.section) if info.section else config
            value = getattr(table, info.key)
            for path in _paths_in(value):
                if info.key == "model" and _is_cached(path):
                    continue
                name = f"[{info.section}] {info.key}" if info.section else info.key
                self.path(path, name)


def _paths_in(value: Any) -> list[Path]:
    """Return the paths in a parsed setting, including strings that are paths of existing files."""
    values = value if isinstance(value, tuple) else (value,)
    paths = [each.path if isinstance(each, Source) else each for each in values]
    texts = [Path(each) for each in paths if isinstance(each, str) and "/" in each]
    return [each for each in paths if isinstance(each, Path)] + [
        path for path in texts if path.is_absolute() and len(str(path)) < 4096 and path.exists()
    ]


def _is_cached(path: Path) -> bool:
    """Return whether a folder is a snapshot of a model in the cache of the hub."""
    parts = path.parts
    repository = next((part for part in parts if part.startswith("models--")), "")
    cached = cached_folder(repository.removeprefix("models--").replace("--", "/"))
    return bool(repository) and cached is not None and cached.resolve() == path.resolve()


# -- Models and data files, for the lists that a form suggests -------------------------------------


MOST_LISTED = 200
DATA_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".jsonl.gz")
NOT_DATA = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
MOST_LEVELS = 4


def inventory(places: Places) -> dict[str, list[str]]:
    """Return the model folders and data files; paths below the root are relative to it."""
    models: list[str] = []
    data: list[str] = []
    for place in (places.root, *places.others):
        level = [place]
        for _ in range(MOST_LEVELS):
            below: list[Path] = []
            for folder in level:
                try:
                    entries = sorted(folder.iterdir())
                except OSError:
                    continue
                names = {entry.name for entry in entries}
                if "config.json" in names:
                    models.append(_short(folder, places.root))
                    continue
                is_run = "run.toml" in names
                for entry in entries:
                    if entry.name.startswith(".") or entry.is_symlink():
                        continue
                    if entry.is_dir() and not (is_run and entry.name not in ("model", "best")):
                        below.append(entry)
                    elif not is_run and entry.name.endswith(DATA_SUFFIXES):
                        data.append(_short(entry, places.root))
            level = below[:MOST_LISTED]
    data = [name for name in data if Path(name).name not in NOT_DATA]
    return {"models": models[:MOST_LISTED], "data": data[:MOST_LISTED]}


def _short(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if root in path.parents else str(path)
