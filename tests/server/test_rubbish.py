"""Raw sockets: nothing that a client sends, or stops sending, hurts anybody but that client."""

import json
import random
import socket
import threading

import pytest

BODY = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()


def head(path=b"/v1/completions", method=b"POST", **headers):
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: x"]
    lines += [k.replace("_", "-").encode() + b": " + v for k, v in headers.items()]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def length(body=BODY):
    return str(len(body)).encode()


def talk(server, *pieces, finish=True):
    """Sends the pieces one by one and returns all that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        answer = b""
        try:
            for piece in pieces:
                sock.sendall(piece)
            if finish:
                sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(65536):
                answer += data
        except OSError:  # the server has closed first
            pass
        return answer


def leave(server, *pieces):
    """Sends the pieces and is gone, with a reset."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        for piece in pieces:
            sock.sendall(piece)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def still_serves(server):
    answer = server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == " w0 w1"
    while server.service.open:  # the answer arrives a moment before its request is let go
        server.http.get("/version")
    return True


def test_garbage_bytes(server):
    noise = random.Random(0)
    for size in (1, 10, 1000, 100_000):
        talk(server, noise.randbytes(size))
    for line in (
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\n",
    ):
        talk(server, line)
    assert still_serves(server)


def test_what_is_no_http_is_answered_in_json(server):
    answer = talk(server, b"HELLO\r\n\r\n", finish=False)
    status, _, body = answer.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_huge_heads(server):
    huge = head(X_Filler=b"x" * 200_000)
    assert talk(server, huge)[:12] in (b"HTTP/1.1 400", b"")
    talk(server, b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n")
    many = head(**{f"X_{i}": b"y" for i in range(3000)})
    talk(server, many)
    assert still_serves(server)


@pytest.mark.parametrize(
    "value", [b"-1", b"abc", b"1e3", b"99999999999999999999", b"0x10", b"5, 6", b"\xb2"]
)
def test_wrong_content_lengths(server, value):
    answer = talk(server, head(Content_Length=value), BODY)
    assert answer[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 413")
    assert still_serves(server)


def test_content_length_below_and_above_what_is_sent(server):
    below = talk(server, head(Content_Length=b"5", Connection=b"close"), BODY, finish=False)
    assert below.startswith(b"HTTP/1.1 400")
    assert b"200 OK" not in talk(server, head(Content_Length=b"5000"), BODY)
    assert still_serves(server)


def test_chunked_bodies(server):
    chunked = head(Transfer_Encoding=b"chunked", Connection=b"close")
    pieces = [b"%x\r\n%s\r\n" % (len(c), c) for c in (BODY[:3], BODY[3:10], BODY[10:])]
    assert b" w0 w1" in talk(server, chunked, *pieces, b"0\r\n\r\n", finish=False)
    for bad in (b"zz\r\n", b"-5\r\nabc\r\n", b"ffffffffffffffffffffff\r\n", b"3\r\nabcdef\r\n"):
        assert b"200 OK" not in talk(server, chunked, bad)
    both = head(Transfer_Encoding=b"chunked", Content_Length=length(), Connection=b"close")
    talk(server, both, *pieces, b"0\r\n\r\n")
    assert still_serves(server)


def test_an_endless_body_is_cut_off(serve, fakes):
    with serve(fakes.Client(), max_body_mib=0.01) as server:
        chunk = b"2000\r\n" + b"a" * 0x2000 + b"\r\n"
        answer = talk(server, head(Transfer_Encoding=b"chunked"), *[chunk] * 1000)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 413")
        with_length = head(Content_Length=b"20000", Connection=b"close")
        answer = talk(server, with_length, b"a" * 20_000, finish=False)
        assert answer.startswith(b"HTTP/1.1 413") and b"10485 bytes" in answer
        asking = head(Content_Length=b"20000", Expect=b"100-continue")
        assert talk(server, asking, finish=False).startswith(b"HTTP/1.1 413")
        assert still_serves(server)


def test_half_requests_then_gone(server):
    whole = head(Content_Length=length()) + BODY
    for cut in range(1, len(whole), 7):
        leave(server, whole[:cut])
    for cut in range(1, len(whole), 11):
        talk(server, whole[:cut])
    assert still_serves(server)


def test_a_body_in_drops_is_served_and_does_not_block_others(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        slow.sendall(head(Content_Length=length(), Connection=b"close"))
        for byte in BODY[:-1]:
            slow.sendall(bytes([byte]))
        assert still_serves(server)
        slow.sendall(BODY[-1:])
        answer = b""
        while data := slow.recv(65536):
            answer += data
    assert b" w0 w1" in answer


def test_pipelined_requests_are_answered_in_order(server):
    one = head(Content_Length=length()) + BODY
    last = head(Content_Length=length(), Connection=b"close") + BODY
    assert talk(server, one + one + last, finish=False).count(b" w0 w1") == 3


def test_odd_methods_and_paths(server):
    for method in (b"BREW", b"OPTIONS", b"HEAD", b"CONNECT", b"TRACE"):
        answer = talk(server, head(method=method, Connection=b"close"), finish=False)
        assert answer.startswith(b"HTTP/1.1 405")
    for path in (b"/..%2f..%2fetc/passwd", b"//", b"/%ff%fe", b"/%00", b"*", b"http://x/health"):
        answer = talk(server, head(path, b"GET", Connection=b"close"), finish=False)
        assert answer.startswith(b"HTTP/1.1 4")
    upgrade = head(b"/health", b"GET", Upgrade=b"websocket", Connection=b"Upgrade, close")
    talk(server, upgrade)
    assert still_serves(server)


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_that_leaves_stops_its_request(serve, fakes, stream):
    client = fakes.Client(permits=threading.Semaphore(1))
    body = b'{"prompt": "abc", "max_tokens": 100, "stream": ' + stream + b"}"
    with serve(client) as server:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        sock.sendall(head(Content_Length=length(body)) + body)
        if stream == b"true":
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        while not client.num_open():
            client.permits.acquire(timeout=0.01)
        sock.close()
        assert client.aborts.get(timeout=30) == client.submitted[0].id
        client.permits.release(1000)
        assert still_serves(server)
        metrics = server.http.get("/metrics").text
        assert 'request_success_total{finished_reason="abort"} 1.0' in metrics
        assert 'route="/v1/completions",status="499"' in metrics or stream == b"true"


def test_all_prompts_of_a_client_that_leaves_are_stopped(serve, fakes):
    client = fakes.Client(permits=threading.Semaphore(0))
    body = json.dumps({"prompt": ["a", "b", "c"], "n": 2}).encode()
    with serve(client) as server:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        sock.sendall(head(Content_Length=length(body)) + body)
        while client.num_open() < 6:
            client.permits.acquire(timeout=0.01)
        sock.close()
        stopped = {client.aborts.get(timeout=30) for _ in range(3)}
        assert stopped == {s.id for s in client.submitted}


def test_a_reader_that_does_not_read_holds_up_nobody(serve, fakes):
    with serve(fakes.Client(max_model_len=200_000)) as server:
        body = json.dumps({"prompt": "abc", "max_tokens": 20_000, "stream": True}).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(head(Content_Length=length(body)) + body)
            assert sock.recv(100)
            answer = server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
            assert answer.status_code == 200
