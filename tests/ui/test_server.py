"""The server of `lohan ui`: who may ask, which paths it reads, and what it answers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from lohan.ui.places import Places
from lohan.ui.runs import LogFile, Logs, find_runs
from lohan.ui.server import application
from tests.support import HANG_S
from tests.support.training_runs import HOSTILE_TEXT, LOGGED_STEP, write_run_folder

TOKEN, PORT = "a-token-of-a-test", 8787
BASE = f"http://127.0.0.1:{PORT}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def client(root: Path) -> TestClient:
    app = application(Places.of(root), token=TOKEN, port=PORT)
    return TestClient(app, base_url=BASE)


def ask(client: TestClient, path: str, **query: str) -> Any:
    answer = client.get(f"/{TOKEN}/api/{path}", params=query)
    return answer.status_code, answer.json()


def tell(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(f"/{TOKEN}/api/{path}", json=body)
    return answer.status_code, answer.json()


# -- Who may ask -----------------------------------------------------------------------------------


def test_page_needs_the_token(client: TestClient) -> None:
    assert client.get(f"/{TOKEN}/").status_code == 200
    for path in ("/", "/api/runs", "/wrong/", f"/{TOKEN[:-1]}/", f"/x/{TOKEN}/", "//"):
        answer = client.get(path)
        assert answer.status_code == 404 and TOKEN not in answer.text, path


@pytest.mark.parametrize(
    ("header", "value", "code"),
    [
        ("host", "evil.example", 421),
        ("host", f"127.0.0.1:{PORT + 1}", 421),
        ("origin", "http://evil.example", 403),
        ("origin", "null", 403),
        ("origin", f"https://127.0.0.1:{PORT}", 403),
        ("sec-fetch-site", "cross-site", 403),
        ("sec-fetch-site", "same-site", 403),
    ],
)
def test_refuses_other_hosts_and_origins(
    client: TestClient, header: str, value: str, code: int
) -> None:
    answer = client.get(f"/{TOKEN}/api/runs", headers={header: value})
    assert answer.status_code == code and "open the address" in answer.json()["error"]


def test_accepts_its_own_origin(client: TestClient) -> None:
    answer = client.get(f"/{TOKEN}/api/runs", headers={"origin": BASE})
    assert answer.status_code == 200


def test_changes_need_json(client: TestClient) -> None:
    """A form of another page can post text, but not this content type."""
    answer = client.post(f"/{TOKEN}/api/stop", content='{"name": "x"}')
    assert answer.status_code == 415
    assert client.get(f"/{TOKEN}/api/stop").status_code == 405
    assert client.post(f"/{TOKEN}/api/runs", json={}).status_code == 405
    big = client.post(f"/{TOKEN}/api/stop", json={"name": "x" * 2**20})
    assert big.status_code == 400 and "shorten it" in big.json()["error"]


def test_answers_forbid_scripts_and_frames(client: TestClient) -> None:
    for path in ("", "static/app.js", "api/runs"):
        headers = client.get(f"/{TOKEN}/{path}").headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


# -- Paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../other", "/etc", "link", "root/../../other", "..", "a\0b", "~root", "%2e%2e/other"]
)
def test_refuses_runs_outside_of_the_folder(client: TestClient, root: Path, name: str) -> None:
    write_run_folder(root.parent / "other", 1)
    (root / "link").symlink_to(root.parent / "other")
    code, answer = ask(client, "run", name=name)
    assert code == 400
    assert (
        "is outside" in answer["error"]
        or "no run" in answer["error"]
        or ("not a path" in answer["error"])
    )
    assert tell(client, "export", name=name, out="x")[0] == 400


@pytest.mark.parametrize("name", ["../server.py", "..%2fserver.py", "report.html", "index.html"])
def test_serves_only_its_static_files(client: TestClient, name: str) -> None:
    assert client.get(f"/{TOKEN}/static/{name}").status_code == 404


def test_links_are_not_searched_for_runs(root: Path) -> None:
    write_run_folder(root.parent / "other", 1)
    (root / "link").symlink_to(root.parent / "other")
    write_run_folder(root / "a" / "b", 1)
    assert list(find_runs(root)) == [root / "a" / "b"]


def test_settings_name_no_path_outside(client: TestClient, root: Path) -> None:
    (root / "m").mkdir()
    (root / "d.jsonl").write_text("{}")
    inside = {"model": "m", "data": "d.jsonl"}
    for key, path in (("data", "/etc/passwd"), ("budget.ssd", "/mnt"), ("eval.data", "../x")):
        code, answer = tell(client, "check", name="run", values={**inside, key: path})
        assert code == 400 and "is outside" in answer["error"], key
        assert (
            f"--also {Path(root / path).resolve().parent}" in answer["error"] or key == "budget.ssd"
        )
    code, answer = tell(client, "check", name="run", values=inside)
    assert code == 200
    assert answer["toml"] == 'model = "m"\ndata = "d.jsonl"\nout = "run"\n'
    for key in ("data", "eval.data"):
        code, answer = tell(client, "check", name="run", values={**inside, key: "b.jsonl"})
        assert code == 400 and f"{root / 'b.jsonl'}: no such file or folder" in answer["error"]
    assert tell(client, "check", name="../run", values=inside)[0] == 400
    assert tell(client, "check", name=".", values=inside)[0] == 400


def test_other_places_are_allowed_by_name(root: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    places = Places.of(root, (tmp_path / "more",))
    assert places.path(tmp_path / "more" / "x", "data") == tmp_path / "more" / "x"


# -- Runs ------------------------------------------------------------------------------------------


def test_lists_runs_with_hostile_names_as_data(client: TestClient, root: Path) -> None:
    run = write_run_folder(root / "<img src=x onerror=alert(1)>", 1, 2)
    run.samples_file.write_text(
        json.dumps({"step": 1, "samples": [{"prompt": HOSTILE_TEXT, "text": HOSTILE_TEXT}]}) + "\n"
    )
    code, answer = ask(client, "runs")
    assert code == 200
    (row,) = answer["runs"]
    assert row["name"] == run.path.name and row["step"] == 2 and row["state"] == "failed"
    response = client.get(f"/{TOKEN}/api/run", params={"name": row["name"]})
    assert response.headers["content-type"] == "application/json"
    view = response.json()["runs"][0]
    assert view["samples"] == [["1", HOSTILE_TEXT, HOSTILE_TEXT]] and view["charts"]["loss"][0][
        "y"
    ] == [2.0, 1.0]
    assert "no store" in view["state"]["words"] and not view["state"]["resumable"]


def test_one_broken_run_does_not_hide_others(client: TestClient, root: Path) -> None:
    write_run_folder(root / "good", 1)
    write_run_folder(root / "bad", 1).metrics_file.write_text('{"step": -1}\n')
    rows = {row["name"]: row for row in ask(client, "runs")[1]["runs"]}
    assert rows["bad"]["state"] == "unreadable" and "remove that line" in rows["bad"]["words"]
    assert rows["good"]["step"] == 1


def test_reads_only_what_was_appended(root: Path) -> None:
    run = write_run_folder(root / "run", 1, 2)
    log = LogFile(run.metrics_file)
    assert [row["step"] for row in log.rows()] == [1, 2]
    with open(run.metrics_file, "a") as file:
        file.write(json.dumps({**LOGGED_STEP, "step": 3}) + "\n" + '{"step": 4, "lo')
    assert [row["step"] for row in log.rows()] == [1, 2, 3]
    with open(run.metrics_file, "a") as file:
        file.write('ss": 1.0}\n')
    assert [row["step"] for row in log.rows()] == [1, 2, 3, 4]
    # A resumed run replaces its log, so that it ends with the last committed step.
    replaced = run.path / "new"
    replaced.write_text(json.dumps({**LOGGED_STEP, "step": 1}) + "\n")
    replaced.replace(run.metrics_file)
    assert [row["step"] for row in log.rows()] == [1]
    run.metrics_file.unlink()
    assert log.rows() == [] and Logs().rows(run.metrics_file, lambda row, path: None) == []


def test_checks_each_row_once(root: Path) -> None:
    """A page polls every two seconds, also for runs of a hundred thousand steps."""
    run, checks = write_run_folder(root / "run", 1, 2), list[int]()
    log = LogFile(run.metrics_file, lambda row: checks.append(row["step"]))
    log.rows()
    with open(run.metrics_file, "a") as file:
        file.write(json.dumps({**LOGGED_STEP, "step": 3}) + "\n")
    for _ in range(3):
        assert [row["step"] for row in log.rows()] == [1, 2, 3]
    assert checks == [1, 2, 3]


def test_a_wrong_row_is_an_error_until_it_is_removed(client: TestClient, root: Path) -> None:
    run = write_run_folder(root / "run", 1, 2)
    assert ask(client, "run", name="run")[0] == 200
    good = run.metrics_file.read_text()
    run.metrics_file.write_text(good + json.dumps({**LOGGED_STEP, "step": 3, "busy": "all"}) + "\n")
    for _ in range(2):
        code, answer = ask(client, "run", name="run")
        assert code == 400 and "step 3: busy is 'all'" in answer["error"]
    run.metrics_file.write_text(good)
    assert ask(client, "run", name="run")[1]["runs"][0]["step"] == 2


def test_stop_needs_a_process(client: TestClient, root: Path) -> None:
    write_run_folder(root / "run", 1)
    code, answer = tell(client, "stop", name="run")
    assert code == 400 and "no process trains it" in answer["error"]


# -- Plan ------------------------------------------------------------------------------------------


def test_reports_at_once_whether_a_batch_fits(client: TestClient) -> None:
    query = {"model": "llama-3-8b", "machine": "rtx4090", "batch": "8"}
    code, fit = ask(client, "fit", **query)
    assert code == 200 and fit["fits"] and fit["largest_batch"] > 8
    assert fit["command"] == "lohan plan --model llama-3-8b --machine rtx4090 --batch 8"
    assert {entry["tier"] for entry in fit["ledger"]} == {"device", "host", "ssd"}
    code, fit = ask(client, "fit", **{**query, "batch": str(fit["largest_batch"] + 1)})
    assert not fit["fits"] and "fits with" not in fit["reason"] and "memory" in fit["reason"]


def test_typed_numbers_replace_those_of_the_machine(client: TestClient) -> None:
    query = {"model": "llama-3-8b", "machine": "rtx4090"}
    whole = ask(client, "fit", **query)[1]
    less = ask(client, "fit", **query, device_memory="8GiB", drive_bytes="1TB", ssds="3")[1]
    assert less["budgets"] == {"host": whole["budgets"]["host"], "device": 2**33, "ssd": 3 * 10**12}
    assert less["largest_batch"] < whole["largest_batch"]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"model": ""}, "model: not given"),
        ({"model": "lama-3-8b"}, "did you mean llama-3-8b"),
        ({"model": "/etc/passwd"}, "is outside"),
        ({"machine": "rtx4091"}, "did you mean"),
        ({"machine": "/etc/hosts"}, "is outside"),
        ({"batch": "0"}, "wants a whole number of at least 1"),
        ({"host": "8"}, "did you mean 8GiB"),
        ({"tflops": "-3"}, "wants a number above 0"),
        ({"ssds": "many"}, "wants a whole number from 1"),
        ({"minimise": "cost", "machine": "dgx-a100"}, "has no prices"),
        ({"no-such": "1"}, "not a field of the plan"),
    ],
)
def test_wrong_numbers_get_the_messages_of_the_project(
    client: TestClient, query: dict[str, str], words: str
) -> None:
    code, answer = ask(client, "fit", **{"model": "llama-3-8b", "machine": "rtx4090", **query})
    assert code == 400 and words in answer["error"], answer


def test_plan_is_that_of_the_command_line(client: TestClient, lohan: Any) -> None:
    query = {"model": "qwen3-0.6b", "machine": "rtx4090", "batch": "4", "seq": "256"}
    code, plan = ask(client, "plan", **query)
    assert code == 200, plan
    words = [f"--{key}={value}" for key, value in query.items()]
    printed = json.loads(lohan("plan", *words, "--json").out)
    assert plan["tokens_per_s"] == printed["tokens_per_s"] and plan["plan"] == printed["plan"]


def test_refused_settings_are_reported_at_the_first_field(client: TestClient) -> None:
    code, answer = tell(client, "check", name="", values={})
    assert code == 400 and "out: not given" in answer["error"]
    code, answer = tell(client, "check", name="run", values={"train.lr": "fast", "model": "m"})
    assert code == 400 and '[train] lr: got text "fast", wants a number above 0' in answer["error"]
    code, answer = tell(client, "check", name="run", values={"train.speed": "1"})
    assert code == 400 and "train.speed: not a setting" in answer["error"]


# -- The command -----------------------------------------------------------------------------------


def test_command_prints_its_address_and_ends_by_ctrl_c(root: Path) -> None:
    command = [sys.executable, "-m", "lohan", "ui", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(f"{root}: open http://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=HANG_S) in (0, 130)
        finally:
            process.kill()  # or the end of `with` would wait for ever


def test_server_does_not_import_torch() -> None:
    code = "import sys, lohan.ui.server; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
