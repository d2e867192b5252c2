"""Kimi's tokenizer from files of its form, with a small vocabulary."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.core import CheckpointError, RequestError
from crossdock.models.detokenizer import Detokenizer
from crossdock.models.kimi_tokenizer import KimiTokenizer
from crossdock.models.tokenizer import load_tokenizer

MERGES = [
    "12",
    "123",
    "1234",
    "ab",
    "abc",
    " a",
    " abc",
    "他",
    "他a",
    "字",
    "中",
    "文",
    "中文",
    "文a",
]
BASE = 256 + len({m.encode()[:k] for m in MERGES for k in range(2, len(m.encode()) + 1)})


def write_kimi(path: Path, **config: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokens = [bytes([b]) for b in range(256)]
    for merge in (m.encode() for m in MERGES):  # with every prefix, so that BPE can get there
        tokens += [p for k in range(2, len(merge) + 1) if (p := merge[:k]) not in tokens]
    lines = [base64.b64encode(t) + b" %d" % i for i, t in enumerate(tokens)]
    (path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    names = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>"]
    added = {str(BASE + i): {"content": n, "special": True} for i, n in enumerate(names)}
    added[str(BASE + 20)] = {"content": "<|tool_call_begin|>", "special": False}
    config = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]"},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        "chat_template": "{% for m in messages %}<|im_{{ m.role }}|>{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_assistant|>{% endif %}",
        **config,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": BASE + 2}))
    return path


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    return load_tokenizer(write_kimi(tmp_path_factory.mktemp("kimi")))


def test_kimi_vocabulary(kimi):
    assert isinstance(kimi, KimiTokenizer)
    assert kimi.vocab_size == BASE + 256
    assert (kimi.bos_token_id, kimi.eos_token_ids) == (BASE, (BASE + 2, BASE + 1))
    assert kimi.token_id("<|im_end|>") == BASE + 2
    assert kimi.token_id(f"<|reserved_token_{BASE + 255}|>") == BASE + 255
    assert BASE + 255 in kimi.special_ids and BASE + 20 not in kimi.special_ids
    assert kimi.token_bytes(BASE + 256) == b""


def test_kimi_splits_text_as_its_pattern_says(kimi):
    def pieces(text: str) -> list[str]:
        return [kimi.token_text(i) for i in kimi.encode(text)]

    assert pieces("1234") == ["123", "4"]  # three digits at most, though 1234 is a token
    assert pieces("中文abc") == ["中文", "abc"]  # a Han run ends before Latin letters
    assert pieces("他a") == ["他", "a"]
    assert pieces("ab abc") == ["ab", " abc"]


def test_kimi_refuses_lone_surrogates(kimi):
    with pytest.raises(RequestError, match="surrogate"):
        kimi.encode("ab\ud800")


def test_kimi_special_tokens_and_chat(kimi):
    assert kimi.encode("[BOS]") == [BASE]
    ids = kimi.apply_chat_template([{"role": "user", "content": "abc"}])
    names = [kimi.token_text(i) for i in ids]
    assert names == ["<|im_user|>", "abc", "<|im_end|>", "<|im_assistant|>"]
    assert kimi.decode(ids) == "abc"
    assert kimi.decode([BASE + 20]) == "<|tool_call_begin|>"


def test_kimi_chat_template_file_comes_first(tmp_path):
    path = write_kimi(tmp_path)
    (path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert load_tokenizer(path).apply_chat_template([{"role": "user", "content": "1"}]) == [
        BASE,
        ord("1"),
    ]


def test_kimi_without_chat_template(tmp_path):
    with pytest.raises(RequestError, match="no chat template"):
        load_tokenizer(write_kimi(tmp_path, chat_template=None)).apply_chat_template([])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_kimi_streams_what_it_decodes(kimi, data):
    ids = data.draw(st.lists(st.integers(0, kimi.vocab_size - 1), max_size=30))
    detokenizer = Detokenizer(kimi)
    deltas = [detokenizer.push([i]) for i in ids]
    assert "".join(deltas) + detokenizer.flush() == kimi.decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=80))
def test_kimi_round_trip(kimi, text):
    assert kimi.decode(kimi.encode(text), skip_special_tokens=False) == text


def test_kimi_long_texts_and_runs(kimi):
    """The regex engine fails on texts and runs of this length; the cuts keep every character."""
    for text in ("a" * 60_001, " " * 60_000 + "x", "ab " * 150_000):
        assert kimi.decode(kimi.encode(text)) == text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "truncated or corrupt"),
        (b"AA== 0\nnot-base64! 1\n", r"tiktoken\.model:2: expected 'base64 rank'"),
        (b"AA== 0\nAQ==\n", r":2: expected"),
        (b"AA== 0\nAQ== 5\n", "ranks are not 0 to"),
    ],
)
def test_kimi_broken_vocabulary(tmp_path, content, expected):
    path = write_kimi(tmp_path)
    (path / "tiktoken.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=expected):
        load_tokenizer(path)


def test_kimi_broken_config(tmp_path):
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        load_tokenizer(write_kimi(tmp_path, added_tokens_decoder={"x": 1}))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not valid JSON"):
        load_tokenizer(tmp_path)
