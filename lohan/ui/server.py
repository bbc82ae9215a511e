"""The web application of `lohan ui`: pages, answers as JSON, and access control.

It listens on loopback only. Every address begins with a secret token, so that neither another user
of the machine nor a web page in the same browser can guess it. Requests with another Host (DNS
rebinding) or from another origin are refused. Paths are limited to the given folders.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import socket
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lohan import __version__
from lohan.errors import ConfigError, LohanError
from lohan.optim import OPTIMIZERS
from lohan.train.run_folder import RunFolder
from lohan.ui import form, plans
from lohan.ui.places import Places, inventory
from lohan.ui.processes import CommandError, Processes, interrupt, output_of
from lohan.ui.runs import Logs, RunRecord, RunState, list_runs, read_record, state_of
from lohan.ui.view import LAST_LINES, run_view
from lohan.util.files import write_atomic

HOST = "127.0.0.1"
PORT = 8787
MOST_BODY_BYTES = 1 << 20
MOST_OVERLAID = 8
MOST_PROMPT_CHARACTERS = 100_000
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
TYPES = {
    ".svg": "image/svg+xml",
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
}
MODULES = ("app", "dom", "charts", "timeline", "run", "runs", "plan", "new", "try")
SERVED = ("style.css", "icon.svg", *(f"{name}.js" for name in MODULES))

Handler = Callable[[Request], Awaitable[Any]]


# -- Access control --------------------------------------------------------------------------------


class Guard:
    """The access control, which refuses requests without the token or from another origin."""

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app, self._token = app, token
        self._hosts = {f"{HOST}:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            code, words = refusal
            await _refused(words, code)(scope, receive, send)
            return
        path = scope["path"][len(self._token) + 1 :]
        inner = {**scope, "path": path, "root_path": "", "raw_path": path.encode()}
        await self._app(inner, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if headers.get(b"host", "") not in self._hosts:
            return 421, "wrong host; open the address that `lohan ui` has printed"
        origin = headers.get(b"origin")
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            return 403, "another origin; open the address that `lohan ui` has printed"
        if headers.get(b"sec-fetch-site", "none") not in ("same-origin", "none"):
            return 403, "another site; open the address that `lohan ui` has printed"
        token = scope["path"].split("/")[1] if "/" in scope["path"] else ""
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return 404, "not found; open the address that `lohan ui` has printed"
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", "").partition(";")[0].strip()
            if kind != "application/json":
                return 415, f"content type {kind!r}, wants application/json"
        return None


def _refused(words: str, code: int) -> Response:
    return JSONResponse({"error": words}, status_code=code, headers=HEADERS)


def answering(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that sends the handler's result, or the message of its error, as JSON."""

    async def answer(request: Request) -> Response:
        try:
            result = await handler(request)
        except LohanError as error:
            return _refused(str(error), 400)
        except OSError as error:
            prefix = f"{error.filename}: " if error.filename else ""
            return _refused(f"{prefix}{error.strerror or error}", 400)
        # A defect of the pages is also reported as JSON, so that the page can show it.
        except Exception:
            traceback.print_exc()
            return _refused("the server has failed here; its terminal shows where", 500)
        if isinstance(result, Response):
            return result
        return JSONResponse(result, headers=HEADERS)

    return answer


async def body_of(request: Request) -> dict[str, Any]:
    text = b""
    async for part in request.stream():
        text += part
        if len(text) > MOST_BODY_BYTES:
            raise ConfigError(f"the request is longer than {MOST_BODY_BYTES:,} bytes; shorten it")
    try:
        body = json.loads(text)
    except ValueError:
        raise ConfigError("the request is not JSON; reload the page") from None
    if not isinstance(body, dict):
        raise ConfigError("the request is not an object; reload the page")
    return body


def text_in(body: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = body.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{key}: got {json.dumps(value)}, wants a text")
    return value


# -- The application -------------------------------------------------------------------------------


class Application:
    """The endpoints, and the state that they keep between requests."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.logs = Logs()
        self.processes = Processes(places)
        # Only one command runs at a time, because plans and answers use all cores.
        self._one_command = asyncio.Lock()
        self._one_search = asyncio.Lock()

    def routes(self) -> list[Route]:
        get: dict[str, Handler] = {
            "/api/start": self.start,
            "/api/runs": self.runs,
            "/api/run": self.run,
            "/api/fit": self.fit,
            "/api/plan": self.plan,
            "/api/model": self.model,
        }
        post: dict[str, Handler] = {
            "/api/stop": self.stop,
            "/api/resume": self.resume,
            "/api/export": self.export,
            "/api/report": self.report,
            "/api/check": self.check,
            "/api/dry-run": self.dry_run,
            "/api/train": self.train,
            "/api/answer": self.answer,
        }
        return [
            Route("/", answering(self.page), methods=["GET"]),
            Route("/static/{name}", answering(self.file), methods=["GET"]),
            *(Route(path, answering(each), methods=["GET"]) for path, each in get.items()),
            *(Route(path, answering(each), methods=["POST"]) for path, each in post.items()),
        ]

    async def page(self, request: Request) -> Response:
        return _static("index.html")

    async def file(self, request: Request) -> Response:
        name = request.path_params["name"]
        return _static(name) if name in SERVED else _refused(f"no file {name!r}", 404)

    async def start(self, request: Request) -> Any:
        """Return data that is constant while the server runs, and the files that forms suggest."""

        def facts() -> dict[str, Any]:
            return {
                "root": str(self.places.root),
                "version": __version__,
                "models": plans.models(),
                "machines": plans.machines(),
                "batches": plans.BATCHES,
                "typed": {key: meaning for key, (_, meaning) in plans.TYPED.items()},
                "optimizers": list(OPTIMIZERS),
                "fields": form.fields(),
                "files": inventory(self.places),
            }

        return await run_in_threadpool(facts)

    # -- Runs --------------------------------------------------------------------------------------

    async def runs(self, request: Request) -> Any:
        def found() -> dict[str, Any]:
            rows = list_runs(self.places.root, self.logs, self._state)
            return {"runs": rows, "starts": self._starts({row["name"] for row in rows})}

        return await run_in_threadpool(found)

    def _starts(self, known_runs: set[str]) -> list[dict[str, Any]]:
        """Return the trainings that this page started and that have no run folder.

        Either they are starting, or they failed before they created the folder.
        """
        rows = []
        for record in self.processes.records():
            path = Path(record.run)
            if self.places.root not in path.parents:
                continue  # The folder has been moved in the meantime.
            name = str(path.relative_to(self.places.root))
            if record.kind == "train" and name not in known_runs:
                known_runs.add(name)
                alive = self.processes.is_alive(record)
                rows.append(
                    {
                        "name": name,
                        "state": "starting" if alive else "failed",
                        "time": record.time,
                        "log": self.processes.log(record)[-LAST_LINES:],
                    }
                )
        return rows

    def _record(self, name: str) -> RunRecord:
        return read_record(self.places.run(name), self.logs)

    async def run(self, request: Request) -> Any:
        names = request.query_params.getlist("name")
        if not 0 < len(names) <= MOST_OVERLAID:
            raise ConfigError(f"{len(names)} runs: choose 1 to {MOST_OVERLAID}")
        return {"runs": [await run_in_threadpool(self._view, name) for name in names]}

    def _state(self, run: RunRecord) -> RunState:
        """Return the state of a run.

        A process that was started here counts as part of the run before it locks the store, which
        takes some seconds, and after it has closed the store.
        """
        state = state_of(run)
        if state.active:
            return state
        for record in self.processes.of_run(run.folder.path):
            if record.kind in ("train", "resume") and self.processes.is_alive(record):
                log = run.folder.metrics_file
                ends = log.exists() and log.stat().st_mtime > record.time
                words = "closes its files" if ends else "loads Python, torch and the model"
                return replace(
                    state, name="ending" if ends else "starting", words=words, process=record.pid
                )
        return state

    def _view(self, name: str) -> dict[str, Any]:
        run = self._record(name)
        records = self.processes.of_run(run.folder.path)
        trained = next((r for r in records if r.kind in ("train", "resume")), None)
        log = None if trained is None else self.processes.log(trained)[-LAST_LINES:]
        # A run that was continued in a terminal has a later log than the one recorded here.
        state = self._state(run)
        if trained is not None and state.active and not self.processes.is_alive(trained):
            log = None
        others = [record for record in records if record.kind in ("export", "report")][:3]
        return {
            **run_view(run, state, log=log),
            "id": name,
            "prompted": run.config.task in (None, "language", "preference"),
            "jobs": [
                {
                    "kind": record.kind,
                    "running": self.processes.is_alive(record),
                    "code": self.processes.exit_code(record),
                    "log": self.processes.log(record)[-8:],
                }
                for record in others
            ],
        }

    async def stop(self, request: Request) -> Any:
        name = text_in(await body_of(request), "name")

        def ask() -> dict[str, Any]:
            process = self._state(self._record(name)).process
            if not process:
                raise ConfigError(f"{name}: no process trains it; reload the page")
            interrupt(process)
            return {"process": process}

        return await run_in_threadpool(ask)

    async def resume(self, request: Request) -> Any:
        body = await body_of(request)
        name, steps = text_in(body, "name"), text_in(body, "steps", "").strip()

        def begin() -> dict[str, Any]:
            folder = self._idle(name)
            words = ["resume", str(folder.path)]
            if steps:
                if not steps.isdecimal():
                    raise ConfigError(f"steps: got {steps!r}, wants a whole number")
                words += ["--steps", steps]
            return {"id": self.processes.start("resume", folder.path, words).id}

        return await run_in_threadpool(begin)

    def _idle(self, name: str) -> RunFolder:
        """Return the folder of a run; raise ConfigError if a process has it open or exports it."""
        run = self._record(name)
        state = self._state(run)
        if state.active:
            raise ConfigError(f"{name}: process {state.process} has it open; stop it first")
        for record in self.processes.of_run(run.folder.path):
            if record.kind == "export" and self.processes.is_alive(record):
                raise ConfigError(f"{name}: `lohan {record.kind}` works on it; wait for its end")
        return run.folder

    async def export(self, request: Request) -> Any:
        body = await body_of(request)
        name, out = text_in(body, "name"), text_in(body, "out")

        def begin() -> dict[str, Any]:
            folder = self._idle(name)
            target = self.places.path(form.name_of_run(self.places, out), "out")
            words = ["export", str(folder.path), "--out", str(target)]
            return {"id": self.processes.start("export", folder.path, words).id}

        return await run_in_threadpool(begin)

    async def report(self, request: Request) -> Any:
        name = text_in(await body_of(request), "name")

        def begin() -> dict[str, Any]:
            path = self.places.run(name).path
            return {"id": self.processes.start("report", path, ["report", str(path)]).id}

        return await run_in_threadpool(begin)

    # -- Plan --------------------------------------------------------------------------------------

    async def fit(self, request: Request) -> Any:
        question = plans.Question.of(self.places, request.query_params)
        facts = await run_in_threadpool(plans.quick, question)
        return {**facts, "command": question.command()}

    async def model(self, request: Request) -> Any:
        question = plans.Question.of(self.places, request.query_params)
        async with self._one_search:
            return await run_in_threadpool(plans.row_of_model, question)

    async def plan(self, request: Request) -> Any:
        """Run `lohan plan` until it ends or the page sends another request."""
        question = plans.Question.of(self.places, request.query_params)
        machine = await run_in_threadpool(question.machine)
        with tempfile.TemporaryDirectory(prefix="lohan-ui-") as work:
            file = Path(work) / "machine.toml"
            file.write_text(machine.to_toml(), encoding="utf-8")
            async with self._one_command:
                if await request.is_disconnected():
                    raise CommandError("nobody waits for the plan any more")
                out, _ = await output_of(
                    question.words(file), cwd=Path(work), disconnected=request.is_disconnected
                )
        facts = json.loads(out)
        facts["machine_usd_per_s"] = machine.usd_per_s
        return facts

    # -- New run -----------------------------------------------------------------------------------

    async def _settings(self, request: Request) -> tuple[str, str]:
        """Check a form, and return the name of the run and the text of its settings file."""
        body = await body_of(request)
        values = body.get("values")
        if not isinstance(values, dict) or not all(isinstance(v, str) for v in values.values()):
            raise ConfigError("values: not a table of texts; reload the page")
        name = form.name_of_run(self.places, text_in(body, "name", ""))
        text = form.settings_text(values, name)
        await run_in_threadpool(form.parsed, text, self.places)
        return name, text

    async def check(self, request: Request) -> Any:
        name, text = await self._settings(request)
        return {"toml": text, "file": f"{name}.toml"}

    async def dry_run(self, request: Request) -> Any:
        """Read the data and plan the run, as `lohan train --dry-run` does."""
        _, text = await self._settings(request)
        config = form.parsed(text, self.places)
        with tempfile.TemporaryDirectory(prefix="lohan-ui-") as work:
            file = Path(work) / "run.toml"
            file.write_text(config.to_toml(), encoding="utf-8")
            words = ["train", "--config", str(file), "--dry-run", "--json"]
            async with self._one_command:
                out, err = await output_of(
                    words, cwd=self.places.root, disconnected=request.is_disconnected
                )
        return {"plan": json.loads(out), "notes": err.splitlines(), "toml": text}

    async def train(self, request: Request) -> Any:
        name, text = await self._settings(request)

        def begin() -> dict[str, Any]:
            target = self.places.path(name, "out")
            for record in self.processes.of_run(target):
                if self.processes.is_alive(record):
                    raise ConfigError(f"{name}: `lohan {record.kind}` works on it already")
            file = form.save(self.places, name, text)
            words = ["train", "--config", str(file)]
            record = self.processes.start("train", target, words)
            return {"id": record.id, "name": name, "command": shlex.join(["lohan", *words])}

        return await run_in_threadpool(begin)

    # -- Try a model ------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Any:
        """Answer a prompt with the weights of a run, or with the weights it started from."""
        body = await body_of(request)
        which, prompt = text_in(body, "which"), text_in(body, "prompt")
        if which not in ("before", "after"):
            raise ConfigError(f"which: got {which!r}, wants before or after")
        if not prompt.strip() or len(prompt) > MOST_PROMPT_CHARACTERS:
            raise ConfigError(
                f"prompt: has {len(prompt):,} characters, wants 1 to {MOST_PROMPT_CHARACTERS:,}"
            )
        numbers = {
            "max-new-tokens": text_in(body, "tokens", "64"),
            "temperature": text_in(body, "temperature", "0"),
            "seed": text_in(body, "seed", "0"),
        }
        for key, text in numbers.items():
            if not text.replace(".", "", 1).isdigit():
                raise ConfigError(f"{key}: got {text!r}, wants a number")
        folder = self.places.run(text_in(body, "name"))
        config = await run_in_threadpool(folder.config)
        ssd = next(iter(folder.all_ssd_folders(config, 1)), folder.path)
        source = folder.path if which == "after" else config.model
        with tempfile.TemporaryDirectory(prefix="lohan-ui-") as work:
            # The prompt is passed in a file, so that it is never parsed as an option or a file
            # name.
            file = Path(work) / "prompt.jsonl"
            write_atomic(file, (json.dumps({"prompt": prompt}) + "\n").encode())
            words = ["generate", str(source), "--prompt", str(file), "--json", "--ssd", str(ssd)]
            for key, text in numbers.items():
                words += [f"--{key}", text]
            if config.budget.host is not None:
                words += ["--host", str(config.budget.host)]
            async with self._one_command:
                out, _ = await output_of(
                    words, cwd=Path(work), disconnected=request.is_disconnected
                )
        (pair,) = json.loads(out)
        return {"which": which, "text": pair["text"]}


def _static(name: str) -> Response:
    content = (files("lohan.ui") / "static" / name).read_bytes()
    kind = TYPES[Path(name).suffix]
    return Response(content, media_type=kind, headers=HEADERS)


def application(places: Places, *, token: str, port: int) -> ASGIApp:
    """Return the web application with its guard."""
    return Guard(Starlette(routes=Application(places).routes()), token=token, port=port)


def serve(places: Places, *, port: int | None, ready: Callable[[str], None]) -> None:
    """Serve the pages on loopback until Ctrl-C; `ready` is called with their address.

    The address is announced when requests are accepted and Ctrl-C is handled. Without `port`,
    PORT is used or, if that is taken, a free port.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready(f"http://{HOST}:{number}/{token}/")

    listener = _listener(port)
    number = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    app = application(places, token=token, port=number)
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=2
    )
    Server(settings).run(sockets=[listener])


def _listener(port: int | None) -> socket.socket:
    for number in (PORT, 0) if port is None else (port,):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, number))
        except OSError as error:
            listener.close()
            if number == port:
                raise ConfigError(
                    f"--port {port}: {error.strerror}; choose another, or leave it out"
                ) from None
        else:
            return listener
    raise ConfigError(f"no port is free on {HOST}; close a program that listens there")
