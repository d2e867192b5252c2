"""Before the engine is there, when it fails, and how the server ends."""

import json
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from crossdock.core import CrossdockError, UserError
from crossdock.server import claim_port, run_server

SLOW = {"prompt": "abc", "max_tokens": 5, "stream": True}


def test_loading_then_ready(serve, fakes):
    with serve(None) as server:
        health = server.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "loading"
        refused = server.http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "loading"
        assert server.http.get("/metrics").status_code == 200
        server.service.attach(fakes.Client())
        assert server.http.get("/health").json() == {"status": "ok"}
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert "crossdock:num_requests_running 0.0" in server.http.get("/metrics").text
        assert server.http.get("/version").json()["version"]


def test_a_lost_rank_ends_open_streams_answers_503_and_then_the_server(serve, fakes, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("crossdock.server.run.time", SimpleNamespace(monotonic=lambda: now[0]))
    client = fakes.Client(permits=threading.Semaphore(1))
    with serve(client) as server:
        with server.http.stream("POST", "/v1/completions", json=SLOW) as answer:
            lines = answer.iter_lines()
            assert " w0" in next(lines)
            client.failure = "rank 1 was killed by signal 9"
            rest = [line for line in lines if line]
        error = json.loads(rest[0].removeprefix("data: "))["error"]
        assert "rank 1 was killed" in error["message"] and error["code"] == "engine_error"
        health = server.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert "rank 1 was killed" in health.json()["error"]["message"]
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert server.thread.is_alive()
        now[0] += 2.5
        server.thread.join(60)
        assert not server.thread.is_alive() and server.server.exit_code == 1


def test_drain_lets_running_requests_finish(serve, fakes):
    client = fakes.Client(permits=threading.Semaphore(1))
    with serve(client) as server:
        with server.http.stream("POST", "/v1/completions", json=SLOW) as answer:
            lines = answer.iter_lines()
            assert " w0" in next(lines)
            server.server.drain(60)
            assert server.http.get("/health").json()["status"] == "draining"
            refused = server.http.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            client.permits.release(100)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and len(rest) == 5
        server.thread.join(60)
        assert not server.thread.is_alive() and server.server.exit_code == 0
        assert client.aborts.empty()


def test_drain_has_a_limit(serve, fakes):
    client = fakes.Client(permits=threading.Semaphore(1))
    with serve(client) as server:
        with server.http.stream("POST", "/v1/completions", json=SLOW) as answer:
            lines = answer.iter_lines()
            assert " w0" in next(lines)
            server.server.drain(0)
            rest = [line for line in lines if line]
        error = json.loads(rest[0].removeprefix("data: "))["error"]
        assert "shutting down" in error["message"] and error["code"] == "draining"
        assert client.aborts.get(timeout=60) == client.submitted[0].id
        server.thread.join(60)
        assert not server.thread.is_alive() and server.server.exit_code == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_cut_before_its_first_token_is_answered_as_new_requests_are(serve, fakes, stream):
    client = fakes.Client(permits=threading.Semaphore(0))
    submit = client.submit
    with serve(client) as server:

        def submit_and_drain(*args):
            submit(*args)
            server.server.drain(0)

        client.submit = submit_and_drain
        cut = server.http.post("/v1/completions", json={**SLOW, "stream": stream})
        assert cut.status_code == 503 and cut.json()["error"]["code"] == "draining"
        server.thread.join(60)
        assert server.server.exit_code == 0


def answer_at_the_end(server, path, begun):
    """Of a server that is told to end once the engine does what is asked there, and ends well."""
    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.http.post(path, json={})))
    asking.start()
    assert begun.wait(60)
    server.server.drain(60)
    asking.join(60)
    server.thread.join(60)
    assert server.server.exit_code == 0
    return answers[0]


def test_a_trace_does_not_hold_up_the_end(serve, fakes):
    client, begun = fakes.Client(), threading.Event()

    def wait_for_steps(steps, timeout):
        begun.set()
        assert client.traces.finished.wait(60)
        return []

    client.traces.act = wait_for_steps
    with serve(client) as server:
        assert answer_at_the_end(server, "/v1/trace", begun).status_code == 409


def test_a_move_of_experts_does_not_hold_up_the_end(serve, fakes):
    client, begun = fakes.Client(), threading.Event()

    def move(policy):
        begun.set()
        assert client.closed.wait(60)
        raise CrossdockError("the engine is closed")

    client.balancer.act = move
    with serve(client) as server:
        answer = answer_at_the_end(server, "/v1/experts/rebalance", begun)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")


def test_what_is_loaded_is_left_out_of_garbage_collection(serve, fakes, monkeypatch):
    done = []
    collector = SimpleNamespace(
        collect=lambda: done.append("collected"), freeze=lambda: done.append("frozen")
    )
    monkeypatch.setattr("crossdock.server.run.gc", collector)
    with serve(None) as server:
        server.server.load(lambda: done.append("started") or fakes.Client(), None, "")
        assert done == ["started", "collected", "frozen"]
        assert server.http.get("/health").json() == {"status": "ok"}


def test_a_taken_port_is_the_users_error():
    with claim_port("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf":{port}: .*--port"):
            claim_port("127.0.0.1", port)
    claim_port("127.0.0.1", port).close()
    with pytest.raises(UserError, match="65535"):
        claim_port("127.0.0.1", 70_000)
    with pytest.raises(UserError, match=r"no\.such\.host"):
        claim_port("no.such.host.invalid", 0)


def test_an_engine_that_does_not_start_is_raised(fakes):
    from crossdock.core import ServerConfig

    def start():
        raise UserError("the checkpoint is truncated")

    outcome = []

    def run():
        try:
            run_server(start, ServerConfig(port=0))
        except UserError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert outcome == ["the checkpoint is truncated"]


PROGRAM = """
import importlib.util, sys, threading
spec = importlib.util.spec_from_file_location("fakes", sys.argv[1])
fakes = importlib.util.module_from_spec(spec)
sys.modules["fakes"] = fakes
spec.loader.exec_module(fakes)
from crossdock.core import ServerConfig
from crossdock.server import claim_port, run_server
client = fakes.FakeClient(permits=threading.Semaphore(int(sys.argv[2])))
def start():
    if sys.argv[3] == "stuck":
        print("loading", flush=True)
        threading.Event().wait()
    return client
def ready(url):
    print(url, flush=True)
    sys.stdin.readline()
    client.permits.release(1000)
    if sys.stdin.readline().startswith("fail"):
        client.failure = "rank 0 lost"
sys.exit(run_server(start, ServerConfig(port=0, drain_s=60), on_ready=ready))
"""


@pytest.fixture
def spawn(fakes):
    """Starts `run_server` in a process of its own; its first line is the URL."""
    started = []

    def start(permits=1, mode="ready"):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, fakes.file, str(permits), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def open_stream(url):
    port = int(url.rsplit(":", 1)[1])
    sock = socket.create_connection(("127.0.0.1", port), timeout=60)
    body = json.dumps(SLOW).encode()
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    sock.sendall(body)
    seen = b""
    while b" w0" not in seen:
        seen += sock.recv(65536)
    return sock


def read_all(sock):
    with sock:
        answer = b""
        while data := sock.recv(65536):
            answer += data
    return answer


def test_sigterm_drains_and_exits_0(spawn):
    process, url = spawn()
    sock = open_stream(url)
    process.send_signal(signal.SIGTERM)
    process.stdin.write("go\n")
    process.stdin.flush()
    assert b" w4" in read_all(sock)
    assert process.wait(60) == 0


def test_sigint_does_not_wait_for_long_requests(spawn):
    process, url = spawn()
    sock = open_stream(url)
    process.send_signal(signal.SIGINT)
    assert b"shutting down" in read_all(sock)
    assert process.wait(60) == 0  # long before drain_s


def test_sigint_while_loading(spawn):
    process, line = spawn(mode="stuck")
    assert line == "loading"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


def test_a_lost_rank_exits_1(spawn):
    process, _ = spawn()
    process.stdin.write("go\nfail\n")
    process.stdin.flush()
    assert process.wait(60) == 1
