"""Upload an exported folder to the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lohan.errors import ModelError, first_line

# Hidden files are not uploaded. They hold the mark of the run; all other files of an export are
# part of the model.
NOT_UPLOADED = [".*", "*/.*"]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_upload(name: str, *, offline: bool) -> None:
    """Raise an error if an upload cannot succeed, before anything is exported.

    `name` is the name of the repository. `offline` states that downloads are off.
    """
    if not _NAME.fullmatch(name) or ".." in name or "--" in name:
        raise ModelError(f"--push {name}: must be ORG/NAME, such as my-name/my-model")
    if offline:
        raise ModelError(
            f"--push {name}: HF_HUB_OFFLINE forbids it; unset the variable, or leave --push out"
        )
    from huggingface_hub import HfApi

    with _online(), _in_words(name):
        HfApi().whoami()


def upload(folder: Path, name: str) -> str:
    """Upload an exported folder as one commit, and return the URL of the commit.

    A new repository is private. In an existing one, files of the same name are replaced; the
    earlier versions stay in its history.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _online(), _in_words(name):
        api.create_repo(name, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=f"Upload {folder.name}",
            ignore_patterns=NOT_UPLOADED,
        )
    return str(commit.commit_url)


@contextmanager
def _online() -> Iterator[None]:
    """Allow requests to the hub, which `set_up_libraries` forbids."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _in_words(name: str) -> Iterator[None]:
    """Convert an error of the `with` body to one that names the repository and the next step."""
    try:
        yield
    except Exception as error:  # No network, no login, no permission, a limit of the hub.
        reason = first_line(error) or "no reason given"
        raise ModelError(
            f"--push {name}: the Hugging Face hub refused it or cannot be reached "
            f"({type(error).__name__}: {reason}); check `hf auth login`, the name and the network"
        ) from None
