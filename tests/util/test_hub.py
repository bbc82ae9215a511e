"""Models of the hub by name: out of the cache on this machine, or fetched from a server."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from lohan.cli.train import fetch_model
from lohan.config import load_config
from lohan.errors import ModelError
from lohan.util.hub import cached_folder, fetch

COMMIT = "0" * 39 + "1"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"not wanted",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


def fill(cache: Path, **files: bytes) -> Path:
    repo = cache / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name, data in (FILES | files).items():
        (snapshot / name).write_bytes(data)
    return snapshot


def test_a_name_is_found_in_the_cache(cache: Path) -> None:
    snapshot = fill(cache)
    assert cached_folder("org/name") == snapshot
    assert cached_folder("org/other") is None
    assert cached_folder("../name") is None
    assert cached_folder("org/name/more") is None


def test_a_cache_without_all_weights_is_not_used(cache: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors"}}).encode()
    fill(cache, **{"model.safetensors.index.json": index})
    assert cached_folder("org/name") is None


def test_settings_take_names_and_keep_the_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = fill(cache)
    given = {"model": "org/name", "data": ["d.jsonl"], "out": "o"}
    config = load_config(None, overrides=given)
    assert config.model == snapshot
    assert f'model = "{snapshot}"' in config.to_toml()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)  # what is there goes first
    assert load_config(None, overrides=given).model == tmp_path / "org" / "name"


class Hub(BaseHTTPRequestHandler):
    fetched: list[str]

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[-1].split("?")[0]
        if "/tree/" in self.path:
            kind = {"type": "file", "oid": COMMIT}
            data = json.dumps(
                [kind | {"path": n, "size": len(d)} for n, d in FILES.items()]
            ).encode()
        elif self.path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": file} for file in FILES]
            data = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode()
        elif name in FILES:
            data = FILES[name]
            type(self).fetched.append(name)
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    fetched: list[str] = []
    handler = type("OneHub", (Hub,), {"fetched": fetched})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    try:
        yield fetched
    finally:
        server.shutdown()


def test_downloads_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch) as fetched:
        given = {"model": Path("org/name"), "data": ["d"], "out": "o"}
        # as `lohan plan` does: nothing is fetched
        result = load_config(None, overrides=given).model
        assert not fetched and not result.exists()
        fetch_model(None, given)
        folder = load_config(None, overrides=given).model
        assert (folder / "model.safetensors").read_bytes() == b"weights"
        assert "pytorch_model.bin" not in fetched  # neither pickles nor code
        fetched.clear()
        assert fetch("org/name") == folder
        assert not fetched


def test_names_the_reason_of_a_failed_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a name that is not there does, or one whose terms must be accepted first."""
    with (
        hub(monkeypatch),
        pytest.raises(ModelError, match=r"cannot be downloaded .*\(\w+Error: .+\)"),
    ):
        fetch_model(None, {"model": Path("org/misspelt")})
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ModelError, match="check the name, the network"):
        fetch("org/other")
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"did you mean org/model\? Otherwise, check the name"):
        fetch("org/modle")
