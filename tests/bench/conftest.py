"""A small server that streams like the real one, with its faults to order."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest


@dataclass
class FakeServer:
    """`tokens_per_chunk`: how a completion is cut. `continuous`: tells usage with every chunk.
    `fail_after`: completions that succeed before each one answers `fail_with`. `together`:
    completions after the first wait until so many have been open at once."""

    tokens_per_chunk: int = 1
    continuous: bool = True
    fail_after: int = 10**9
    fail_with: str = "500"
    together: int = 1
    bodies: list[dict] = field(default_factory=list)
    url: str = ""
    open_now: int = 0
    most_open: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ")[1]
                lengths = [s for s in head.split("\r\n") if s.lower().startswith("content-length")]
                body = await reader.readexactly(int(lengths[0].split(":")[1]) if lengths else 0)
                await self.answer(path, json.loads(body) if body else {}, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, path: str, body: dict, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            self.plain(writer, {"data": [{"id": "fake", "max_model_len": 512}]})
        elif path == "/version":
            self.plain(writer, {"version": "0", "ranks": 4})
        elif path == "/tokenize":
            self.plain(writer, {"tokens": [len(word) for word in body["prompt"].split()]})
        elif path == "/v1/completions":
            wants = body.get("stream_options", {})
            if "continuous_usage_stats" in wants and not self.continuous:
                self.plain(writer, {"error": {"message": "unknown: continuous_usage_stats"}}, 400)
                return
            self.open_now += 1
            self.most_open = max(self.most_open, self.open_now)
            while self.bodies and self.most_open < self.together:
                await asyncio.sleep(0.01)
            await self.complete(body, writer)
            self.open_now -= 1
        else:
            self.plain(writer, {"error": {"message": "no such path"}}, 404)

    def plain(self, writer: asyncio.StreamWriter, value: dict, status: int = 200) -> None:
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)

    async def complete(self, body: dict, writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        if len(self.bodies) > self.fail_after:
            if self.fail_with == "500":
                self.plain(writer, {"error": {"message": "rank 2 is gone"}}, 500)
                return
            if self.fail_with == "drop":
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                self.event(writer, {"choices": [{"text": "a"}]})
                writer.close()
                return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        if len(self.bodies) > self.fail_after and self.fail_with == "event":
            self.event(writer, {"error": {"message": "aborted by rank 1"}})
            writer.write(b"0\r\n\r\n")
            return
        total, sent = body["max_tokens"], 0
        while sent < total:
            sent = min(total, sent + self.tokens_per_chunk)
            chunk = {"choices": [{"text": "word " * self.tokens_per_chunk}]}
            if body["stream_options"].get("continuous_usage_stats"):
                chunk["usage"] = {"completion_tokens": sent}
            self.event(writer, chunk)
            await writer.drain()
            await asyncio.sleep(0)
        self.event(writer, {"choices": [], "usage": {"completion_tokens": total}})
        self.event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    def event(self, writer: asyncio.StreamWriter, value: dict | str) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        data = f"data: {text}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    fake, ready, loop = FakeServer(), threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve())
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60)
    yield fake
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
