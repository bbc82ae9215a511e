"""Models of the Hugging Face hub by name: from the local cache, or downloaded into it."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from lohan.errors import ModelError

# The files of a model. Code, and other formats of the same weights, are not downloaded.
FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cached_folder(name: str) -> Path | None:
    """Return the folder of a model named ORG/NAME if it is completely cached, else None."""
    if not _NAME.fullmatch(name) or ".." in name:
        return None
    from huggingface_hub import snapshot_download

    try:
        return _check_complete(
            Path(snapshot_download(name, local_files_only=True, allow_patterns=FILES))
        )
    except Exception:  # The model is not in the cache, or not completely.
        return None


def fetch(name: str) -> Path | None:
    """Return the folder of a model named ORG/NAME, and download it if it is not cached.

    `HF_HUB_OFFLINE=1` forbids the download. Return None if the name is not of this form, or if a
    download would be needed but is forbidden.
    """
    cached = cached_folder(name)
    offline = os.environ.get("HF_HUB_OFFLINE", "0") != "0"
    if cached is not None or offline or not _NAME.fullmatch(name) or ".." in name:
        return cached
    from huggingface_hub import constants, snapshot_download

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    try:
        return _check_complete(Path(snapshot_download(name, etag_timeout=5, allow_patterns=FILES)))
    except Exception as error:  # No network, no such model, or no permission.
        reason = str(error).strip().split("\n")[0] or "no reason given"
        parent = Path(name).parent
        beside = (
            [each.name for each in parent.iterdir() if each.is_dir()] if parent.is_dir() else []
        )
        close = get_close_matches(Path(name).name, beside, n=1)
        similar = f"did you mean {parent / close[0]}? Otherwise, " if close else ""
        raise ModelError(
            f"--model {name}: no such folder here, and it cannot be downloaded from the Hugging "
            f"Face hub ({type(error).__name__}: {reason}); {similar}check the name, the network "
            "and `hf auth login`, or give a local folder"
        ) from None
    finally:
        constants.HF_HUB_OFFLINE = before


def _check_complete(folder: Path) -> Path:
    """Return the folder if all files of its model are present, else raise FileNotFoundError.

    The content of the weight files is not examined.
    """
    index = folder / "model.safetensors.index.json"
    if not (folder / "config.json").is_file() and not (folder / "model_index.json").is_file():
        raise FileNotFoundError(folder / "config.json")
    if not index.is_file() and not any(folder.rglob("*.safetensors")):
        raise FileNotFoundError(folder / "model.safetensors")
    if index.is_file():
        from lohan.util.files import load_json

        for shard in set(load_json(index)["weight_map"].values()):
            if not (folder / shard).is_file():
                raise FileNotFoundError(folder / shard)
    return folder
