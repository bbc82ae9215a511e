"""Exports carry a model card, and `lohan export --push` uploads them to the hub."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lohan.train.model_card import license_of, name_of
from tests.support.forked_commands import tiny_arguments, write_tiny_inputs

LICENSE = "---\nlicense: apache-2.0\ntags:\n- x\n---\n# Base\n"


def lohan_process(*words, **env):
    """Run `lohan WORDS` in a new interpreter, in which the hub's client reads `env`."""
    return subprocess.run(
        [sys.executable, "-m", "lohan", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )


@pytest.fixture(scope="module")
def run(forge, tmp_path_factory):
    """Train a model and a dataset that lie in the hub's cache."""
    root = tmp_path_factory.mktemp("card")
    plain = write_tiny_inputs(root)
    inputs = root / "hub"
    model = inputs / "models--Org--Base" / "snapshots" / "0123"
    data = inputs / "datasets--Org--Data" / "snapshots" / "4567"
    shutil.copytree(plain / "model", model)
    (model / "README.md").write_text(LICENSE)
    data.mkdir(parents=True)
    shutil.copy(plain / "data.jsonl", data / "train.jsonl")
    words = tiny_arguments(inputs, root / "run")
    words[words.index("--model") + 1] = model
    words[words.index("--data") + 1] = data / "train.jsonl"
    done = forge.run("train", *words)
    assert done.code == 0, done.err
    return root / "run"


def front_matter(card):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(card.split("---\n")[1])


def test_card_names_base_data_license_and_versions(run):
    card = (run / "model" / "README.md").read_text()
    matter = front_matter(card)
    assert matter["base_model"] == "Org/Base" and matter["base_model_relation"] == "finetune"
    assert matter["datasets"] == ["Org/Data"] and matter["license"] == "apache-2.0"
    assert {"lohan", "full-fine-tuning"} <= set(matter["tags"])
    assert matter["library_name"] == "transformers"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert f"| training loss, step 6 | {rows[-1]['loss']:.4f} |" in card
    assert 'model = "Org/Base"' in card and "batch = 2" in card
    assert "* torch " in card and "lohan train --config run.toml" in card
    assert str(run.parent) not in card, "the card shows a path of this machine"


def test_card_settings_repeat_the_run(run, forge, tmp_path):
    """The settings of the card, with the paths put in, train the same weights again."""
    card = (run / "model" / "README.md").read_text()
    settings = card.split("```toml\n")[1].split("```")[0]
    hub = run.parent / "hub"
    model = hub / "models--Org--Base" / "snapshots" / "0123"
    data = hub / "datasets--Org--Data" / "snapshots" / "4567" / "train.jsonl"
    settings = settings.replace('"Org/Base"', json.dumps(str(model)))
    settings = settings.replace('"Org/Data"', json.dumps(str(data)))
    (tmp_path / "run.toml").write_text(settings)
    again = tmp_path / "again"
    done = forge.run("train", "--config", tmp_path / "run.toml", "--out", again, "--steps", 6)
    assert done.code == 0, done.err
    weights = [(r / "model" / "model.safetensors").read_bytes() for r in (run, again)]
    assert weights[0] == weights[1]


def test_card_of_a_later_export_replaces_the_card_of_the_base(run, forge, tmp_path):
    done = forge.run("export", run, "--out", tmp_path / "out", "--as-lora", 2)
    assert done.code == 0, done.err
    card = (tmp_path / "out" / "README.md").read_text()
    assert front_matter(card)["library_name"] == "peft"
    assert "rank-2 approximation" in card and "# Base" not in card


def test_names_of_folders(tmp_path):
    assert name_of(tmp_path / "models--a--b" / "snapshots" / "1").text == "a/b"
    assert name_of(tmp_path / "my-model").text == "my-model"
    assert license_of(tmp_path) == {}
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    assert license_of(tmp_path) == {}


# -- A stand-in for the hub's HTTP interface ------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self):
        if self.headers.get("authorization") != "Bearer hf_right":
            return self.answer({"error": "Invalid token"}, 401)
        self.answer({"name": "org", "type": "user", "orgs": [], "auth": {}})

    def do_POST(self):
        hub, body = self.server, self.body()
        base = f"http://127.0.0.1:{hub.server_port}"
        if self.path == "/api/repos/create":
            hub.created = json.loads(body)
            self.answer({"url": f"{base}/Org/Mine"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            requested = json.loads(body)["files"]
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for f in requested
            ]
            self.answer({"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    "oid": o["oid"],
                    "size": o["size"],
                    "actions": {"upload": {"href": f"{base}/put/{o['oid']}"}},
                }
                for o in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            hub.commit = [json.loads(line) for line in body.splitlines()]
            self.answer({"commitUrl": f"{base}/Org/Mine/commit/1", "commitOid": "1"})
        else:
            self.answer({"error": self.path}, 404)

    def do_PUT(self):
        body = self.body()
        assert hashlib.sha256(body).hexdigest() == self.path.rsplit("/", 1)[1]
        self.server.objects[self.path.rsplit("/", 1)[1]] = body
        self.answer({})


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.objects, server.commit, server.created = {}, [], None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def settings_of(hub, token="hf_right"):
    return {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }


def test_push_uploads_the_export_and_nothing_of_the_store(run, tmp_path, hub):
    out = tmp_path / "out"
    done = lohan_process("export", run, "--out", out, "--push", "Org/Mine", **settings_of(hub))
    assert done.returncode == 0, done.stderr
    # The client of the hub says it in one of two ways, by its version.
    assert hub.created.get("visibility") == "private" or hub.created.get("private") is True
    values = [line["value"] for line in hub.commit if line["key"] != "header"]
    uploaded = {value["path"] for value in values}
    on_disk = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert uploaded == {name for name in on_disk if not name.startswith(".")}
    assert {"README.md", "config.json", "model.safetensors"} <= uploaded
    assert (out / "model.safetensors").read_bytes() in hub.objects.values()
    assert "/Org/Mine/commit/1" in done.stdout


@pytest.mark.parametrize(
    "name, message",
    [("mine", "must be ORG/NAME"), ("Org/Mine", "HF_HUB_OFFLINE forbids it")],
)
def test_push_is_refused_before_anything_is_exported(run, forge, tmp_path, name, message):
    """The suite itself sets HF_HUB_OFFLINE."""
    done = forge.run("export", run, "--out", tmp_path / "out", "--push", name)
    assert done.code == 2 and message in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_push_with_a_wrong_token_is_refused_before_anything_is_exported(run, tmp_path, hub):
    words = ["export", run, "--out", tmp_path / "out", "--push", "Org/Mine"]
    done = lohan_process(*words, **settings_of(hub, "hf_wrong"))
    assert done.returncode == 2 and "check `hf auth login`" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists() and hub.created is None
