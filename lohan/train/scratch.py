"""A run from random weights: a model folder without any, made of a config and a tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lohan.checkpoint.hf_folder import load_config
from lohan.checkpoint.quantized import without_quantization
from lohan.checkpoint.sources import MARK, mark_initial
from lohan.config import Config
from lohan.data.text import load_tokenizer, tokenizer_files
from lohan.errors import ModelError
from lohan.util.atomic import sync_folder, sync_path, write_new
from lohan.util.json_file import read_object

CONFIG = "config.json"


def make_base(config: Config, target: Path) -> None:
    """What `--model` would name: structure and tokenizer, and how weights are drawn."""
    assert config.init is not None
    given = config.init / CONFIG if config.init.is_dir() else config.init
    if not given.is_file():
        raise ModelError(f"--init {given}: no such file; give a config.json")
    raw = read_object(given, kind=ModelError, remedy="give a model's config.json")
    without_quantization(raw)
    target.mkdir(exist_ok=True)
    remove_base(target, last=False)
    write_new(target / CONFIG, (json.dumps(raw, indent=2) + "\n").encode())
    if config.tokenizer is not None:
        _copy_tokenizer(config.tokenizer, target)
    mark_initial(target, config.seed)
    sync_folder(target)


def _copy_tokenizer(source: Path, target: Path) -> None:
    files = {*tokenizer_files(source), *source.glob("*processor*.json")} if source.is_dir() else ()
    if not files:
        raise ModelError(f"--tokenizer {source}: no tokenizer there; give a folder that has one")
    for file in sorted(files):
        shutil.copyfile(file, target / file.name)
        sync_path(target / file.name)
    count = len(load_tokenizer(target, needed_by="--tokenizer"))
    places = getattr(load_config(target).get_text_config(), "vocab_size", None)
    if places is not None and count > places:
        raise ModelError(
            f"--tokenizer {source}: has {count} tokens, vocab_size in {target / CONFIG} is "
            f"{places}; raise vocab_size"
        )


def remove_base(target: Path, *, last: bool = True) -> None:
    """The files that `make_base` writes, and their folder if nothing else is in it."""
    if not target.is_dir():
        return
    own = {*tokenizer_files(target), *target.glob("*processor*.json")}
    for file in (*own, target / CONFIG, target / MARK):
        file.unlink(missing_ok=True)
    if last and not any(target.iterdir()):
        target.rmdir()
