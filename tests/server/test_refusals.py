"""What is wrong with a request is said with the right status, in OpenAI's form, by field."""

import json
import threading
import time
from dataclasses import replace

import pytest

PROMPT = {"model": "storyteller", "prompt": "abc"}
CHAT_PATH = "/v1/chat/completions"
CHAT = {"model": "storyteller", "messages": [{"role": "user", "content": "abc"}]}


def error_of(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"min_tokens": 20, "max_tokens": 2}, "min_tokens"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, 300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 600}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"tools": [{}]}, "tools"),
        ({"store": True}, "store"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"never_heard_of": 1}, "never_heard_of"),
        ({"never_heard_of": None}, "never_heard_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"new": 1}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_bad_completion_fields(server, change, field):
    body = json.dumps({**PROMPT, **change})
    response = server.http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    error = error_of(response, 400)
    assert error["param"] == field and field in error["message"]
    assert not server.client.submitted


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "forbidden"}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 2, "max_tokens": 3}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto", "tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": []}, "functions"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": True}, "chat_template_kwargs"),
        ({"prompt": "a"}, "prompt"),
    ],
)
def test_bad_chat_fields(server, change, field):
    response = server.http.post("/v1/chat/completions", json={**CHAT, **change})
    error = error_of(response, 400)
    assert error["param"] == field
    assert not server.client.submitted


def test_fields_that_change_nothing_are_accepted(server):
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "tools": None,
        "stop": None,
        "temperature": None,
    }
    chat = {**CHAT, **harmless, "modalities": ["text"], "max_tokens": 1}
    chat["messages"] = [{"role": "assistant", "content": "a", "refusal": None, "tool_calls": None}]
    assert server.http.post("/v1/chat/completions", json=chat).status_code == 200
    body = {**PROMPT, **harmless, "echo": False, "suffix": None, "best_of": None}
    assert server.http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "nothing",
    [
        {"tools": []},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"tool_choice": "auto", "parallel_tool_calls": False},
        {"suffix": ""},
        {"best_of": 1},
        {"best_of": 2, "n": 2},
        {"best_of": 1, "n": None},
        {"logit_bias": {}},
    ],
)
def test_values_that_ask_for_nothing_are_accepted(server, nothing):
    response = server.http.post("/v1/completions", json={**PROMPT, **nothing})
    assert response.status_code == 200, response.text
    assert server.http.post(CHAT_PATH, json={**CHAT, "max_tokens": 1, **nothing}).status_code == 200


def test_typos_are_told_from_what_is_missing_yet(server):
    def message(change):
        return error_of(server.http.post(CHAT_PATH, json={**CHAT, **change}), 400)["message"]

    def role(word):
        return message({"messages": [{"role": word, "content": "a"}]})

    roles = "'system', 'developer', 'user' or 'assistant'"
    assert role("alien") == f"messages.0.role: unknown value 'alien'; expected one of {roles}"
    assert role("tool") == f"messages.0.role: 'tool' is not supported yet; {roles} is"
    kind = "response_format.type: "
    assert message({"response_format": {"type": "jsn"}}) == (
        kind + "unknown value 'jsn'; expected 'text'"
    )
    assert "'json_object' is not supported yet" in message(
        {"response_format": {"type": "json_object"}}
    )
    assert "unknown value 'vidio'" in message({"modalities": ["text", "vidio"]})
    assert "not supported yet" in message({"modalities": ["text", "audio"]})
    assert message({"messages": []}) == "messages: expected at least one message"


def test_beyond_the_context_gives_both_numbers(server):
    error = error_of(server.http.post("/v1/completions", json={**PROMPT, "max_tokens": 125}), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    assert all(number in error["message"] for number in ("128", "4", "125", "129"))
    exact = server.http.post("/v1/completions", json={**PROMPT, "max_tokens": 124})
    assert exact.json()["usage"]["total_tokens"] == 128
    long_chat = {**CHAT, "messages": [{"role": "user", "content": "x" * 200}]}
    error = error_of(server.http.post("/v1/chat/completions", json=long_chat), 400)
    assert error["param"] == "messages" and "128" in error["message"]


def test_the_default_limit_shrinks_to_the_rest_of_the_context(server):
    answer = server.http.post("/v1/completions", json={"prompt": [1] * 120}).json()
    assert answer["usage"]["completion_tokens"] == 8
    assert (
        server.http.post("/v1/completions", json=PROMPT).json()["usage"]["completion_tokens"] == 16
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff\xfe",
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "logit_bias": {"1": Infinity}}',
        b'{"prompt": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
def test_bodies_that_are_no_request(server, body):
    response = server.http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    error_of(response, 400)
    assert server.http.post("/v1/completions", json=PROMPT).status_code == 200


def test_other_content_types_are_refused(server):
    form = server.http.post("/v1/completions", data={"prompt": "a"})
    assert "application/json" in error_of(form, 415)["message"]


def test_unknown_model_path_and_method(server):
    body = {**PROMPT, "model": "gpt-4"}
    error = error_of(server.http.post("/v1/completions", json=body), 404)
    assert error["code"] == "model_not_found" and "gpt-4" in error["message"]
    message = error_of(server.http.get("/v2/completions"), 404)["message"]
    assert "/v1/completions" in message and "/v1/models/{name}," in message
    response = server.http.get("/v1/completions")
    assert "POST" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"


def test_body_limit_holds_with_and_without_a_length(serve, fakes):
    with serve(fakes.Client(), max_body_mib=0.01) as server:
        body = json.dumps({**PROMPT, "prompt": "a" * 20_000}).encode()
        kind = {"content-type": "application/json"}
        error_of(server.http.post("/v1/completions", content=body, headers=kind), 413)

        def chunks():
            for start in range(0, len(body), 1000):
                yield body[start : start + 1000]

        error_of(server.http.post("/v1/completions", content=chunks(), headers=kind), 413)
        assert server.http.post("/v1/completions", json=PROMPT).status_code == 200


def test_api_key(serve, fakes):
    with serve(fakes.Client(), api_key="säcret") as server:
        ok = {"authorization": "Bearer säcret".encode()}
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic säcret".encode()},
            {"authorization": "säcret".encode()},
        ):
            for path in ("/v1/completions", "/tokenize", "/admin/anything", "/health"):
                error = error_of(server.http.post(path, json=PROMPT, headers=headers), 401)
                assert error["code"] == "invalid_api_key"
            error_of(server.http.get("/v1/models", headers=headers), 401)
        assert server.http.post("/v1/completions", json=PROMPT, headers=ok).status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert server.http.get(path).status_code == 200
        assert len(server.client.submitted) == 1


def test_full_queue(serve, fakes):
    client = fakes.Client(permits=threading.Semaphore(0))
    with serve(client, max_queue=2) as server:
        answers = []
        threads = [
            threading.Thread(
                target=lambda: answers.append(server.http.post("/v1/completions", json=PROMPT))
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        while client.num_open() < 2:
            threads[0].join(0.01)
        response = server.http.post("/v1/completions", json=PROMPT)
        assert error_of(response, 429)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        client.permits.release(1000)
        for thread in threads:
            thread.join(30)
        assert [a.status_code for a in answers] == [200, 200]
        assert server.http.post("/v1/completions", json=PROMPT).status_code == 200
        assert 'status="429"} 1.0' in server.http.get("/metrics").text


def test_the_queue_has_room_for_twice_what_runs_at_once(serve, fakes):
    client = fakes.Client()
    for running, most in ((10, 512), (300, 1200)):  # of each of two ranks
        client.config = replace(client.config, max_num_seqs=running)
        with serve(client) as server:
            response = server.http.post("/v1/completions", json={**PROMPT, "prompt": ["a"] * 1201})
            assert f"1201 sequences at once, at most {most}" in error_of(response, 400)["message"]


def test_every_choice_takes_a_place_in_the_queue(serve, fakes):
    client = fakes.Client(permits=threading.Semaphore(0))
    with serve(client, max_queue=4) as server:

        def post(path="/v1/completions", body=PROMPT, **changes):
            return server.http.post(path, json={**body, **changes})

        for stream in (False, True):  # never admitted, whatever else is open
            for response in (post(n=5, stream=stream), post(CHAT_PATH, CHAT, n=5, stream=stream)):
                error = error_of(response, 400)
                assert error["param"] == "n" and "5 sequences" in error["message"]
                assert "at most 4" in error["message"] and "max_queue" in error["message"]
        error = error_of(post(prompt=["a", "b", "c"], n=2), 400)
        assert error["param"] == "prompt" and "6 sequences" in error["message"]
        assert not client.submitted

        answers = []
        thread = threading.Thread(target=lambda: answers.append(post(n=3)))
        thread.start()
        while client.num_open() < 3:
            thread.join(0.01)
        for response in (post(n=2), post(prompt=["a", "b"]), post(CHAT_PATH, CHAT, n=4)):
            assert error_of(response, 429)["code"] == "queue_full"
        assert len(client.submitted) == 1
        client.permits.release(1000)
        thread.join(30)
        assert answers[0].status_code == 200 and client.num_open() == 0
        assert post(n=4).status_code == post(prompt=["a", "b"], n=2).status_code == 200


def test_a_client_that_breaks_is_a_500_with_an_id(serve, fakes):
    client = fakes.Client()
    client.tokenizer.encode = lambda *a: 1 / 0
    with serve(client) as server:
        response = server.http.post(
            "/v1/completions", json=PROMPT, headers={"x-request-id": "my-id.1"}
        )
        assert "my-id.1" in error_of(response, 500)["message"]
        assert server.http.get("/health").status_code == 200


def test_request_ids(server, caplog):
    caplog.set_level("INFO", logger="crossdock.server")
    given = server.http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1" and given.json()["id"] == "cmpl-abc-1"
    for rubbish in (b"a b", b"x" * 200, b"\xc3\xa9", b""):
        made = server.http.get("/v1/models", headers={"x-request-id": rubbish})
        assert made.headers["x-request-id"].encode() != rubbish
    assert server.http.get("/no%0aFAKE").status_code == 404
    logged(caplog, "abc-1 POST /v1/completions 200")
    logged(caplog, "prompt_tokens=4 output_tokens=16 ttft=0.")
    logged(caplog, "/no\\nFAKE 404")
    refused = server.http.post("/v1/completions", json={**PROMPT, "a\nFAKE": 1})
    assert refused.status_code == 400
    assert logged(caplog, "a\\nFAKE").endswith("a\\nFAKE: unknown field")
    assert not any("\n" in record.getMessage() for record in caplog.records)


def logged(caplog, words):
    """The server's line with these words: written after the answer has been sent."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for record in list(caplog.records):
            if record.name.startswith("crossdock.server") and words in record.getMessage():
                return record.getMessage()
        time.sleep(0.01)
    raise AssertionError(f"no line says {words!r}: {[r.getMessage() for r in caplog.records]}")


def test_tokenize_and_back(server):
    made = server.http.post("/tokenize", json={"prompt": "hé"}).json()
    assert made == {"count": 4, "max_model_len": 128, "tokens": [256, *"hé".encode()]}
    bare = server.http.post("/tokenize", json={"prompt": "h", "add_special_tokens": False}).json()
    assert bare["tokens"] == [104]
    chat = server.http.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    back = server.http.post("/detokenize", json={"tokens": chat["tokens"]}).json()
    assert back == {"prompt": "user: abc\nassistant:"}
    error_of(server.http.post("/tokenize", json={}), 400)
    assert (
        error_of(server.http.post("/detokenize", json={"tokens": [300]}), 400)["param"] == "tokens"
    )


def test_long_texts_are_tokenized_off_the_loop(serve, fakes):
    client = fakes.Client(max_model_len=10_000)
    inside, go, plain = threading.Event(), threading.Event(), client.tokenizer.encode

    def slow(text, add_special_tokens=True):
        inside.set()
        assert go.wait(30)
        return plain(text, add_special_tokens)

    client.tokenizer.encode = slow
    with serve(client) as server:
        answers = []
        body = {**PROMPT, "prompt": "a" * 5000}
        thread = threading.Thread(
            target=lambda: answers.append(server.http.post("/v1/completions", json=body))
        )
        thread.start()
        assert inside.wait(30)
        assert server.http.get("/health").status_code == 200  # while the encoding blocks
        go.set()
        thread.join(30)
        assert answers[0].json()["usage"]["prompt_tokens"] == 5001
