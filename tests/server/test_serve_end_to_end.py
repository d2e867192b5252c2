"""`crossdock serve` with the shipped model on four ranks, as users and operators meet it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest

MODEL = Path(__file__).parents[2] / "checkpoints" / "storyteller"
RANKS, TOP_K, MOE_LAYERS = 4, 4, 4
ENV = {**os.environ, "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""}
LONG = {"model": "storyteller", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True}


def children(parent):
    """Live processes started by `parent`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(true, seconds=60.0):
    """Polls; fails after the deadline."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.01)


@contextmanager
def serving(*flags):
    """A server that is ready: its process, URL, ranks' pids, and what it says on stderr."""
    command = ["serve", str(MODEL), "--served-model-name", "storyteller", "--ranks", str(RANKS)]
    process = subprocess.Popen(
        [sys.executable, "-m", "crossdock", *command, "--port", "0", "--json", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    )
    said = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
    reader.start()
    ranks = []
    try:
        line = process.stdout.readline()
        assert line, "".join(said)
        url = json.loads(line)["url"]
        ranks = sorted(children(process.pid))
        assert len(ranks) == RANKS

        def ended(seconds):
            """Exit code and stderr; nothing of it may be left."""
            code = process.wait(timeout=seconds)
            reader.join(10)
            assert not [pid for pid in ranks if alive(pid)]
            return code, "".join(said)

        with httpx.Client(base_url=url, timeout=60) as http:
            yield SimpleNamespace(
                process=process,
                url=url,
                http=http,
                ranks=ranks,
                ended=ended,
                openai=openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0),
            )
    finally:
        for pid in [process.pid, *ranks]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        reader.join(10)


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def metrics_of(server):
    """`{name: {labels: value}}`, names without their prefix."""
    found = {}
    text = server.http.get("/metrics").text
    for name, labels, value in re.findall(r"^crossdock:(\w+)(\{.*\})? (\S+)$", text, re.M):
        found.setdefault(name, {})[tuple(re.findall(r'"([^"]*)"', labels))] = float(value)
    return found


def running(server):
    return metrics_of(server)["num_requests_running"][()]


@contextmanager
def long_stream(server, max_tokens=LONG["max_tokens"]):
    """A streamed completion that has begun; its lines."""
    body = {**LONG, "max_tokens": max_tokens, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


@contextmanager
def standing_still(server):
    """No step ends meanwhile, so no request does."""
    os.kill(server.ranks[0], signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # the server has ended it
            os.kill(server.ranks[0], signal.SIGCONT)


def test_streamed_equals_whole(server):
    ask = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 24}
    ask |= {"temperature": 0, "logprobs": 1}
    whole = server.openai.completions.create(**ask)
    chunks = list(
        server.openai.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    parts = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(part.text for part in parts) == whole.choices[0].text
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    tokens = [token for part in parts for token in part.logprobs.tokens]
    assert tokens == whole.choices[0].logprobs.tokens and len(tokens) == 24
    assert "".join(tokens) == whole.choices[0].text


def test_chat_is_its_rendered_prompt(server):
    messages = [{"role": "system", "content": "A tale."}, {"role": "user", "content": "The fox"}]
    rendered = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    ask = {"model": "storyteller", "max_tokens": 12, "temperature": 0}
    chat = server.openai.chat.completions.create(**ask, messages=messages)
    plain = server.openai.completions.create(**ask, prompt=rendered)
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.usage.prompt_tokens == len(rendered)
    stream = server.openai.chat.completions.create(**ask, messages=messages, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == chat.choices[0].message.content


def test_choices_seed_and_stop(server):
    ask = {"model": "storyteller", "prompt": "The king", "max_tokens": 16}
    first, again = (
        [c.text for c in server.openai.completions.create(**ask, n=3, seed=11).choices]
        for _ in range(2)
    )
    assert first == again and len(set(first)) > 1
    stopped = server.openai.completions.create(**ask, temperature=0, stop=[" the"]).choices[0]
    free = server.openai.completions.create(**ask, temperature=0).choices[0]
    assert " the" in free.text and stopped.text == free.text.partition(" the")[0]
    assert stopped.finish_reason == "stop"


def test_what_the_server_says_of_itself(server):
    version = server.http.get("/version").json()
    assert (version["ranks"], version["device"]) == (RANKS, "cpu")
    (card,) = server.http.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"], card["vocab_size"]) == ("storyteller", 1024, 4096)
    assert server.http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "other"}, 404, ("other", "storyteller")),
        ({"max_tokens": 5000}, 400, ("1024", "5000")),
        ({"temperature": -1}, 400, ("temperature",)),
        ({"top_p": "high"}, 400, ("top_p", "high")),
        ({"tools": [{"type": "function"}]}, 400, ("tools", "not supported")),
        ({"response_format": {"type": "json_object"}}, 400, ("response_format", "json_object")),
        ({"echo": True}, 400, ("echo", "not supported")),
        ({"surprise": 1}, 400, ("surprise",)),
        ({"prompt": [4096]}, 400, ("4096",)),
        ({"prompt": "long " * 2_000_000}, 413, ("max_body_mib",)),
    ],
)
def test_refusals(server, change, status, words):
    body = {"model": "storyteller", "prompt": "a", "max_tokens": 4, **change}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == status
    message = answer.json()["error"]["message"]
    assert all(word in message for word in words), message


def test_a_client_that_leaves_frees_its_request(server):
    before = metrics_of(server)
    with long_stream(server):
        assert running(server) == 1
    until(lambda: running(server) == 0)
    after = metrics_of(server)
    ended = {k: n - before["request_success_total"][k] for k, n in
             after["request_success_total"].items()}  # fmt: skip
    assert ended["abort",] == 1 and sum(ended.values()) == 1
    made = after["generation_tokens_total"][()] - before["generation_tokens_total"][()]
    assert 0 < made < 1000
    assert after["kv_cache_usage_perc"][()] == 0


def test_metrics_add_up_after_a_load(server):
    before = metrics_of(server)
    count, output_len = 24, 12
    head = "It was long ago, when the forest was still deep and dark, that a woodcutter lived"
    body = {"model": "storyteller", "max_tokens": output_len, "ignore_eos": True}

    def ask(i):
        answer = server.http.post("/v1/completions", json={**body, "prompt": f"{head}. {i}"})
        return answer.json()["usage"]

    used = [ask(0)]  # its pages are there for the others to find
    with ThreadPoolExecutor(count) as pool:
        used += pool.map(ask, range(1, count))
    after = metrics_of(server)

    def grown(name):
        return {k: v - before.get(name, {}).get(k, 0) for k, v in after[name].items()}

    counters = [n for n in before if n.endswith(("_total", "_count", "_sum", "_bucket"))]
    assert len(counters) > 20
    for name in counters:
        assert min(grown(name).values()) >= 0, name
    prompt, cached = (sum(u) for u in zip(
        *((u["prompt_tokens"], u["prompt_tokens_details"]["cached_tokens"]) for u in used),
        strict=True,
    ))  # fmt: skip
    assert cached > 0
    assert grown("prompt_tokens_total")[()] == prompt
    assert grown("prefix_cache_hits_total")[()] == cached
    assert grown("generation_tokens_total")[()] == count * output_len
    assert grown("time_to_first_token_seconds_count")[()] == count
    assert grown("inter_token_latency_seconds_count")[()] == count * (output_len - 1)
    assert grown("e2e_request_latency_seconds_count")[()] == count
    # Every computed token goes to top-k experts in each layer; the last of a sequence is not
    # computed any more.
    routed = grown("expert_tokens_total")
    computed = prompt - cached + count * (output_len - 1)
    for layer in {layer for _, layer in routed}:
        assert sum(n for (_, at), n in routed.items() if at == layer) == computed * TOP_K, layer
    assert len(routed) == MOE_LAYERS * 32
    assert sum(grown("rank_tokens_total").values()) == sum(routed.values())
    assert len(after["rank_busy_ratio"]) == RANKS
    assert all(0 < ratio <= 1 for ratio in after["rank_busy_ratio"].values())
    for name in ("dispatch", "combine"):
        calls = grown(f"{name}_seconds_count")[()]
        assert calls > 0 and calls % (MOE_LAYERS * RANKS) == 0
        assert grown(f"{name}_seconds_bucket")["+Inf",] == calls
    sent = grown("all_to_all_bytes_total")
    assert sent["self",] > 0 and sent["node",] > 0 and sent["remote",] == 0
    for name in ("expert_load_std_dev", "rank_load_std_dev"):
        assert len(after[name]) == MOE_LAYERS and min(after[name].values()) > 0
    assert all(1 / RANKS <= value <= 1 for value in after["expert_balancedness"].values())
    assert after["prefill_tpgs"][()] > 0 and after["decode_tpgs"][()] > 0
    assert after["num_requests_running"][()] == after["num_requests_waiting"][()] == 0


def test_a_full_queue_and_the_key(tmp_path):
    config = tmp_path / "server.toml"
    config.write_text("max_queue = 2\napi_key = 'secret'\n")
    with serving("--config", str(config)) as server:
        assert server.http.post("/v1/completions", json=LONG).status_code == 401
        assert server.http.get("/v1/models").status_code == 401
        server.http.headers["authorization"] = "Bearer secret"
        with long_stream(server), long_stream(server):
            with standing_still(server):
                answer = server.http.post("/v1/completions", json=LONG)
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            assert "2 sequences" in answer.json()["error"]["message"]
        until(lambda: running(server) == 0)
        short = server.http.post("/v1/completions", json={**LONG, "max_tokens": 2})
        assert short.status_code == 200
        # Ctrl-C in the middle of an answer: everything is gone, and that is no failure.
        # Two signals may reach a busy process as one, which gives a request 2 s to end.
        with long_stream(server) as lines, standing_still(server):
            server.process.send_signal(signal.SIGINT)
            server.process.send_signal(signal.SIGINT)
            assert server.ended(60)[0] == 0
            assert "shutting down" in "".join(lines)


def test_sigterm_lets_a_stream_end(tmp_path):
    config = tmp_path / "server.toml"
    config.write_text("drain_s = 100.0\n")
    with serving("--config", str(config)) as server, long_stream(server, 300) as lines:
        with standing_still(server):
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.http.get("/health").status_code == 503)
            refused = server.http.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in events[-2]
        assert server.ended(60)[0] == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named(how, tmp_path):
    config = tmp_path / "engine.toml"
    config.write_text("deadline_s = 6.0\n")  # longer than a loaded machine may hold up the others
    with serving("--config", str(config)) as server, long_stream(server) as lines:
        os.kill(server.ranks[2], how)
        events = [line for line in lines if line]
        assert "rank 2" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
        code, said = server.ended(60)
        assert code == 1
        assert "rank 2" in said and "Traceback" not in said
        (line,) = [line for line in said.split("\n") if "POST /v1/completions 200" in line]
        assert "rank 2" in line
