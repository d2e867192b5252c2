"""The server as the real openai client sees it."""

import threading

import openai
import pytest


@pytest.fixture
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completion(api, server):
    answer = api.completions.create(model="storyteller", prompt="once", max_tokens=3, stop=["x"])
    assert answer.choices[0].text == " w0 w1 w2"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 5 and answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert server.client.submitted[0].params.stop == ("x",)
    assert server.client.num_open() == 0


def test_completion_streams_with_usage(api):
    stream = api.completions.create(
        model="storyteller",
        prompt="once",
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == " w0 w1 w2 w3"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 4 and not chunks[-1].choices
    assert all(c.usage is None for c in chunks[:-1])


def test_continuous_usage_counts_every_token(api):
    stream = api.completions.create(
        model="storyteller",
        prompt="once",
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    told = [c.usage.completion_tokens for c in stream]
    assert told == [1, 2, 3, 3]


def test_chat_and_its_stream_agree(api):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    asked = {"model": "storyteller", "messages": messages, "max_completion_tokens": 3}
    whole = api.chat.completions.create(**asked)
    assert whole.choices[0].message.content == " w0 w1 w2"
    assert whole.choices[0].message.role == "assistant"
    chunks = list(api.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == " w0 w1 w2"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({c.id for c in chunks}) == 1


def test_chat_renders_the_template(api, server):
    api.chat.completions.create(
        model="storyteller", messages=[{"role": "user", "content": "hé"}], max_tokens=1
    )
    prompt = server.client.submitted[0].prompt
    assert server.client.tokenizer.decode(prompt) == "user: hé\nassistant:"


def test_switches_of_the_template_reach_it(api, server):
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    api.chat.completions.create(
        model="storyteller", messages=body["messages"], max_tokens=1, extra_body=body
    )
    prompt = list(server.client.submitted[0].prompt)
    text = server.client.tokenizer.decode(prompt)
    assert text == "enable_thinking False\nuser: a\nassistant:"
    assert server.http.post("/tokenize", json=body).json()["tokens"] == prompt


def test_what_a_request_does_not_say_of_sampling_the_model_does(api, server):
    def sent(**said):
        api.completions.create(model="storyteller", prompt="a", max_tokens=1, **said)
        params = server.client.submitted[-1].params
        return params.temperature, params.top_p, params.top_k, params.repetition_penalty

    assert sent() == (1.0, 1.0, 0, 1.0)
    server.client.sampling_defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert sent() == (0.6, 1.0, 20, 1.1)
    assert sent(temperature=1.0, top_p=0.5, extra_body={"top_k": 0}) == (1.0, 0.5, 0, 1.1)
    assert sent(extra_body={"temperature": None}) == (0.6, 1.0, 20, 1.1)


def test_chat_without_a_limit_may_fill_the_context(api, server):
    api.chat.completions.create(model="storyteller", messages=[{"role": "user", "content": "a"}])
    sent = server.client.submitted[0]
    assert len(sent.prompt) + sent.params.max_tokens == server.client.max_model_len


def test_several_prompts_and_choices_keep_their_order(api, server):
    answer = api.completions.create(
        model="storyteller", prompt=[[1, 2], [3]], n=2, max_tokens=2, temperature=0.5
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 3 and answer.usage.completion_tokens == 8
    assert [s.prompt for s in server.client.submitted] == [(1, 2), (3,)]
    assert server.client.submitted[0].params.n == 2
    answer = api.completions.create(model="storyteller", prompt=["a", "b"], max_tokens=1)
    assert len(answer.choices) == 2


def test_streamed_choices_are_told_apart(api):
    stream = api.chat.completions.create(
        model="storyteller",
        messages=[{"role": "user", "content": "a"}],
        n=3,
        max_tokens=2,
        stream=True,
    )
    texts = {0: "", 1: "", 2: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert set(texts.values()) == {" w0 w1"}


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(api, stream):
    answer = api.completions.create(
        model="storyteller", prompt="a", max_tokens=2, logprobs=1, stream=stream
    )
    parts = [c.choices[0].logprobs for c in answer] if stream else [answer.choices[0].logprobs]
    assert [t for p in parts for t in p.tokens] == [" w0", " w1"]
    assert [o for p in parts for o in p.text_offset] == [0, 3]
    assert [x for p in parts for x in p.token_logprobs] == [-0.5, -1.5]
    assert parts[0].top_logprobs[0] == {" w0": -0.5, " other": -9999.0}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(api, stream):
    answer = api.chat.completions.create(
        model="storyteller",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=2,
        stream=stream,
    )
    parts = [c.choices[0].logprobs for c in answer] if stream else [answer.choices[0].logprobs]
    tokens = [t for p in parts if p for t in p.content]
    assert [t.token for t in tokens] == [" w0", " w1"]
    assert bytes(tokens[0].bytes) == b" w0"
    assert [t.token for t in tokens[0].top_logprobs] == [" w0", " other"]


def test_extra_sampling_fields_reach_the_engine(api, server):
    api.completions.create(
        model="storyteller",
        prompt="a",
        seed=7,
        logit_bias={"12": 3.5},
        max_tokens=5,
        user="somebody",
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "min_tokens": 2,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "tools": None,
        },
    )
    params = server.client.submitted[0].params
    assert (params.seed, params.top_k, params.min_p, params.repetition_penalty) == (7, 5, 0.1, 1.1)
    assert params.logit_bias == ((12, 3.5),)
    assert params.stop_token_ids == (9,)
    assert params.ignore_eos and params.min_tokens == 2 and not params.skip_special_tokens


def test_models(api):
    assert [m.id for m in api.models.list()] == ["storyteller"]
    assert api.models.retrieve("storyteller").owned_by == "crossdock"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")


def test_served_model_name(serve, fakes):
    with serve(fakes.Client(), served_model_name="org/mine") as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert api.models.list().data[0].id == "org/mine"
        assert api.models.retrieve("org/mine").id == "org/mine"
        assert (
            api.completions.create(model="org/mine", prompt="a", max_tokens=1).model == "org/mine"
        )
        with pytest.raises(openai.NotFoundError) as refused:
            api.completions.create(model="storyteller", prompt="a")
        assert refused.value.code == "model_not_found" and "org/mine" in refused.value.message


def test_errors_are_the_clients_exceptions(api):
    with pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(model="storyteller", prompt="a", temperature=-1)
    assert refused.value.param == "temperature"
    assert refused.value.type == "invalid_request_error"


def test_an_error_in_mid_stream_is_an_event(serve, fakes):
    def script(prompt, params, index):
        good = fakes.Update(0, " w0", (1,))
        return [good, fakes.Update(0, finish_reason="error", error="rank 1 lost: out of memory")]

    permits = threading.Semaphore(1)
    with serve(fakes.Client(script=script, permits=permits)) as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = api.completions.create(model="storyteller", prompt="a", stream=True)
        got = ""
        with pytest.raises(openai.APIError, match="out of memory"):
            for chunk in stream:
                got += chunk.choices[0].text
                permits.release()
        assert got == " w0"
        permits.release(10)
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            api.completions.create(model="storyteller", prompt="a")


def test_many_streams_at_once(serve, fakes):
    results: list[str] = []

    with serve(fakes.Client()) as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def one() -> None:
            stream = api.completions.create(
                model="storyteller", prompt="a", max_tokens=20, stream=True
            )
            results.append("".join(c.choices[0].text for c in stream))

        threads = [threading.Thread(target=one) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == ["".join(f" w{i}" for i in range(20))] * 32
        text = server.http.get("/metrics").text
        assert "crossdock:inter_token_latency_seconds_count 608.0" in text
        assert 'crossdock:request_success_total{finished_reason="length"} 32.0' in text
