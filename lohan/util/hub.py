"""Models of the Hugging Face hub by name: from its cache on this machine, or fetched into it."""

from __future__ import annotations

import os
import re
from pathlib import Path

# What a model is made of; other formats of the same weights, and code, stay where they are.
FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cached_folder(name: str) -> Path | None:
    """The folder of a model that is named as ORG/NAME, if the whole of it is cached."""
    if not _NAME.fullmatch(name) or ".." in name:
        return None
    from huggingface_hub import snapshot_download

    try:
        return _whole(Path(snapshot_download(name, local_files_only=True, allow_patterns=FILES)))
    except Exception:  # not in the cache, or only a part of it
        return None


def fetch(name: str) -> Path | None:
    """As `cached_folder`; what is missing is fetched where the hub can be reached, which
    `HF_HUB_OFFLINE=1` forbids."""
    found = cached_folder(name)
    offline = os.environ.get("HF_HUB_OFFLINE", "0") != "0"
    if found is not None or offline or not _NAME.fullmatch(name) or ".." in name:
        return found
    from huggingface_hub import constants, snapshot_download

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    try:
        return _whole(Path(snapshot_download(name, etag_timeout=5, allow_patterns=FILES)))
    except Exception:  # no network, no such model, no permission: the library has many words for it
        return None
    finally:
        constants.HF_HUB_OFFLINE = before


def _whole(folder: Path) -> Path:
    """As far as a look at its files tells."""
    index = folder / "model.safetensors.index.json"
    if not (folder / "config.json").is_file() and not (folder / "model_index.json").is_file():
        raise FileNotFoundError(folder / "config.json")
    if not index.is_file() and not any(folder.rglob("*.safetensors")):
        raise FileNotFoundError(folder / "model.safetensors")
    if index.is_file():
        from lohan.util.json_file import load_json

        for shard in set(load_json(index)["weight_map"].values()):
            if not (folder / shard).is_file():
                raise FileNotFoundError(folder / shard)
    return folder
