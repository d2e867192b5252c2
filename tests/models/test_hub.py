"""Resolving model names, against a small Hugging Face hub served here on a local port."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from crossdock.core import UserError
from crossdock.models.hub import resolve_model

SHA = "0123456789abcdef0123456789abcdef01234567"
WANTED = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "tiktoken.model": b"x",
    "chat_template.jinja": b"x",
    "model.safetensors": b"weights",
}
UNWANTED = {
    "pytorch_model.bin": b"x",
    "modeling_evil.py": b"x",
    "README.md": b"x",
    "original/consolidated.safetensors": b"x",
    "consolidated.safetensors": b"x",
}
SCRIPT = """
import sys
from crossdock.core import UserError
from crossdock.models.hub import resolve_model
for name in sys.argv[1:]:
    try:
        print(resolve_model(*name.split("@")))
    except UserError as error:
        print("UserError", str(error).replace(chr(10), " "))
"""


class Hub(BaseHTTPRequestHandler):
    """`team/model` at main and v1; `team/gated` lists its files but does not give them."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        files = WANTED | UNWANTED
        if not re.match(r"/(api/models/)?team/(model|gated)(/|$)", path):
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif match := re.fullmatch(r"/api/models/team/\w+(/revision/(.+))?", path):
            if match[2] in (None, "main", "v1", SHA):
                self.answer(200, json.dumps({"id": "team/model", "sha": SHA}).encode())
            else:
                self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": name}
                for name, data in files.items()
            ]
            self.answer(200, json.dumps(entries).encode())
        elif path.startswith("/team/gated/"):
            self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        else:
            name = path.split(f"/resolve/{SHA}/")[1]
            self.answer(200, files[name], {"ETag": f'"{name}"', "X-Repo-Commit": SHA})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(cache: Path, endpoint: str, *names: str, **env: str) -> tuple[list[str], str]:
    """`(a path or an error for each name@revision, stderr)`, resolved in a new process, since
    huggingface_hub reads its environment once."""
    clean = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and k[:2] != "HF"}
    clean |= {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HOME": str(cache / "home")}
    clean |= {"HF_HUB_DISABLE_XET": "1", **env}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names],
        env=clean,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines(), result.stderr


DEAD = "http://127.0.0.1:9"  # the discard port, closed everywhere


def test_downloads_what_is_read_and_nothing_else_then_works_offline(tmp_path, endpoint):
    (path,), _ = resolve(tmp_path, endpoint, "team/model")
    found = {str(p.relative_to(path)): p.read_bytes() for p in Path(path).rglob("*") if p.is_file()}
    assert found == WANTED
    for away in ({"HF_HUB_OFFLINE": "1"}, {}):
        (cached,), said = resolve(tmp_path, DEAD, "team/model", **away)
        assert cached == path
        assert "using the cache" in said


def test_an_incomplete_copy_in_the_cache_is_not_used(tmp_path, endpoint):
    (path,), _ = resolve(tmp_path, endpoint, "team/model@v1")
    (Path(path) / "model.safetensors").unlink()
    (incomplete, unknown), _ = resolve(tmp_path, DEAD, "team/model@v1", "team/other")
    for message in (incomplete, unknown):
        assert message.startswith("UserError")
        assert "not a directory, not completely in the cache, and not downloaded" in message


def test_refusals_say_what_to_do(tmp_path, endpoint):
    expected = {
        "team/nothing": ["'team/nothing'", "neither a directory nor", "HF_TOKEN"],
        "team/model@v9": ["revision 'v9'", "no such revision"],
        "team/gated": ["gated", "accept its terms"],
        "team/mo del": ["neither a directory nor"],
    }
    messages, _ = resolve(tmp_path, endpoint, *expected)
    for message, words in zip(messages, expected.values(), strict=True):
        assert message.startswith("UserError")
        for word in words:
            assert word in message


def test_a_directory_is_used_as_it_is(tmp_path, monkeypatch):
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model("owner/name") == (tmp_path / "owner" / "name").resolve()
    with pytest.raises(UserError, match="--revision"):
        resolve_model("owner/name", "main")


@pytest.mark.parametrize(
    "name", ["./model", "../model", "/nowhere/model", "~/no such model", "owner/other", "a/b/c"]
)
def test_paths_are_never_looked_up_at_the_hub(tmp_path, monkeypatch, name):
    (tmp_path / "owner").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="directory not found"):
        resolve_model(name)


def test_a_file_is_not_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="expected the directory"):
        resolve_model(str(tmp_path / "config.json"))
