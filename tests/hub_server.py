"""A hub on loopback: the part of the Hugging Face hub's HTTP API that public models and data sets need.

``with HubServer({"acme/tiny": folder}) as hub`` serves a folder as the model or data set of that id;
``environment(home, hub.address)`` holds the variables with which a program downloads from it into ``home``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_thisMustNeverBePrinted"
FULLSHARD = [sys.executable, "-m", "fullshard"]


def environment(home: Path, endpoint: str, **changes: str) -> dict[str, str]:
    """The variables of a program that downloads from ``endpoint`` into ``home``; none of this session's settings."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "MODELSCOPE")) and not name.lower().endswith("_proxy")
    }
    short = {"HF_HUB_DOWNLOAD_TIMEOUT": "5", "HF_HUB_ETAG_TIMEOUT": "5", "HF_HUB_DISABLE_TELEMETRY": "1"}
    ours |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    return ours | short | changes


@dataclass
class Served:
    """One model of the server, and how it misbehaves."""

    folder: Path
    refuse: tuple[int, str] | None = None  # (status, X-Error-Code) to every request
    refuse_files: tuple[int, str] | None = None  # the same to requests for files alone
    size: int | None = None  # what the hub says of every file's size instead of the truth
    cut: str = ""  # the transfer of this file ends in the middle, once
    down_after_cut: int = 0  # so many further requests for its content are answered with 503


class HubServer:
    """Serves ``models`` (id -> folder or Served); ``requests`` holds (method, path, Range header or None)."""

    def __init__(self, models: dict[str, Path | Served]) -> None:
        self.models = {name: Served(model) if isinstance(model, Path) else model for name, model in models.items()}
        self.requests: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def downloads(self, model: str = "") -> list[str]:
        """The files whose content was asked for, in order, of one model or of all."""
        return [
            path.rpartition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path and path.startswith(f"/{model}")
        ]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        path = unquote(urlsplit(handler.path).path)
        self.requests.append((handler.command, path, handler.headers.get("Range")))
        api, path = (
            path.startswith("/api/"),
            path.removeprefix("/api").removeprefix("/models").removeprefix("/datasets"),
        )
        words = path.strip("/").split("/", 2)
        model = self.models.get("/".join(words[:2]))
        rest = words[2] if len(words) > 2 else ""
        if model is None:
            _refuse(handler, 404, "RepoNotFound")
        elif model.refuse:
            _refuse(handler, *model.refuse)
        elif not api:
            _answer_file(handler, model, rest.removeprefix("resolve/").partition("/")[2])
        elif rest.startswith("tree/"):
            _send_json(handler, [{"type": "file", "oid": etag, **facts} for facts, etag in _files(model)])
        elif rest in ("", "revision/main", f"revision/{COMMIT}"):
            siblings = [{"rfilename": facts["path"], "size": facts["size"]} for facts, _ in _files(model)]
            _send_json(handler, {"id": "/".join(words[:2]), "sha": COMMIT, "siblings": siblings, "tags": []})
        else:
            _refuse(handler, 404, "RevisionNotFound")


def _files(model: Served) -> list[tuple[dict[str, Any], str]]:
    found = []
    for file in sorted(model.folder.rglob("*")):
        if file.is_file():
            size = file.stat().st_size if model.size is None else model.size
            facts = {"path": file.relative_to(model.folder).as_posix(), "size": size}
            found.append((facts, hashlib.sha1(file.read_bytes()).hexdigest()))
    return found


def _answer_file(handler: BaseHTTPRequestHandler, model: Served, name: str) -> None:
    file = model.folder / name
    wants_content = handler.command == "GET"
    if model.refuse_files or not file.is_file():
        return _refuse(handler, *(model.refuse_files or (404, "EntryNotFound")))
    if wants_content and model.cut == f"{name} was cut" and model.down_after_cut:
        model.down_after_cut -= 1
        return _refuse(handler, 503, "")
    content = file.read_bytes()
    start = int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
    handler.send_response(206 if start else 200)
    handler.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
    handler.send_header("X-Repo-Commit", COMMIT)
    handler.send_header("Accept-Ranges", "bytes")
    handler.send_header("Content-Length", str(len(content) - start))
    if start:
        handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    handler.end_headers()
    if wants_content and name == model.cut:
        model.cut = f"{name} was cut"
        content = content[: len(content) // 2]
        handler.close_connection = True
    if wants_content:
        handler.wfile.write(content[start:])


def _send_json(handler: BaseHTTPRequestHandler, value: Any) -> None:
    body = json.dumps(value).encode()
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _refuse(handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
    handler.send_response(status)
    if code:
        handler.send_header("X-Error-Code", code)
    handler.send_header("X-Error-Message", f"you sent {handler.headers.get('Authorization')}")  # repeats the token
    handler.send_header("Content-Length", "0")
    handler.end_headers()
