"""Tokenizers and the streaming of their text, on vocabularies trained here on random Unicode."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from crossdock.core import CheckpointError, RequestError
from crossdock.models.detokenizer import Detokenizer
from crossdock.models.tokenizer import load_tokenizer

CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ raise_exception('no tools here') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SENTENCE_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"  # DeepSeek's, outside the byte alphabet
ALPHABET = "abcde fgh ABC.,!?0123456789\n\t éüñßжщяλ中文字好世界日本語のテスト한국어😀👩‍👧🇫🇷\u0301"


def random_text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(ALPHABET, k=length))


def write_tokenizer(path: Path, tokenizer: tokenizers.Tokenizer, **config: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def byte_level() -> tokenizers.Tokenizer:
    rng = random.Random(1)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", SENTENCE_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([random_text(rng, 200) for _ in range(200)], trainer)
    tokenizer.add_tokens(["<tool call>"])
    return tokenizer


def sentencepiece_like() -> tokenizers.Tokenizer:
    rng = random.Random(2)
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))],
        limit_alphabet=40,
        show_progress=False,
    )
    tokenizer.train_from_iterator([random_text(rng, 200) for _ in range(100)], trainer)
    data = json.loads(tokenizer.to_str())
    # Byte tokens are ordinary vocabulary in real files, not special.
    data["added_tokens"] = [t for t in data["added_tokens"] if not t["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(data))


@pytest.fixture(scope="module")
def byte_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("byte_level")
    write_tokenizer(path, byte_level(), bos_token="<s>", eos_token="</s>", chat_template=CHAT)
    (path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    return path


@pytest.fixture(scope="module")
def tokenizer(byte_dir):
    return load_tokenizer(byte_dir)


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    path = write_tokenizer(tmp_path_factory.mktemp("spm"), sentencepiece_like(), eos_token="</s>")
    return load_tokenizer(path)


def stream(tokenizer, ids: list[int], chunk: int = 1, **kwargs: bool) -> str:
    detokenizer = Detokenizer(tokenizer, continues=False, **kwargs)
    deltas = [detokenizer.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    return "".join(deltas) + detokenizer.flush()


def test_encode_and_decode_agree_with_the_library(byte_dir, tokenizer):
    reference = tokenizers.Tokenizer.from_file(str(byte_dir / "tokenizer.json"))
    rng = random.Random()
    for _ in range(20):
        text = random_text(rng, 100)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text).ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == reference.get_vocab_size()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (2, 1))


def test_special_tokens(tokenizer):
    ids = tokenizer.encode("a</s>b", add_special_tokens=False)
    assert ids[1] == tokenizer.token_id("</s>") == 1
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a</s>b"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_id("<no such token>") is None


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    trained = byte_level()
    trained.enable_truncation(4)
    trained.enable_padding(length=64, pad_id=0, pad_token="<s>")
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, trained))
    text = random_text(random.Random(), 80)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bos_is_added_only_when_asked_for(tmp_path):
    trained = byte_level()
    trained.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    path = write_tokenizer(tmp_path, trained, bos_token="<s>", chat_template=CHAT)
    tokenizer = load_tokenizer(path)
    plain = tokenizer.encode("abc", add_special_tokens=False)
    assert tokenizer.encode("abc") == [0, *plain]
    # The template writes its own.
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "abc"}])
    assert ids[0] == 0 and 0 not in ids[1:]


@pytest.mark.parametrize("declared", ["LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer"])
def test_the_tokenizer_json_counts_not_the_declared_class(tmp_path, declared):
    """DeepSeek declares Llama's class, whose pre-tokenizer would lose every space."""
    path = write_tokenizer(
        tmp_path, byte_level(), tokenizer_class=declared, bos_token="<s>", add_bos_token=True
    )
    (path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    tokenizer = load_tokenizer(path)
    text = "two words " + random_text(random.Random(), 50)
    reference = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids
    assert tokenizer.encode(text, add_special_tokens=False) == reference
    assert tokenizer.encode(text) == [0, *reference]  # add_bos_token, as its file does not
    assert tokenizer.decode(reference) == text


def test_chat_template(tokenizer):
    messages = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "x"}]
    text = tokenizer.decode(tokenizer.apply_chat_template(messages), skip_special_tokens=False)
    assert text == "<s>[user]hé[assistant]x[assistant]"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert tokenizer.decode(ids) == "[user]hé[assistant]x"


def test_a_template_that_refuses_is_the_requests_mistake(tokenizer):
    with pytest.raises(RequestError, match="no tools here") as caught:
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])
    assert caught.value.param == "messages"


def test_no_chat_template(spm):
    assert not spm.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        spm.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("kind", ["tokenizer", "spm"])
def test_lone_surrogates_are_refused(kind, request):
    with pytest.raises(RequestError, match="surrogate"):
        request.getfixturevalue(kind).encode("ab\ud800")


def test_token_bytes_of_every_token_rebuild_the_text(tokenizer, spm):
    rng = random.Random()
    text = random_text(rng, 300)
    for each, expected in ((tokenizer, text), (spm, " " + text)):
        ids = each.encode(text, add_special_tokens=False)
        assert b"".join(map(each.token_bytes, ids)) == expected.encode()
    assert tokenizer.token_bytes(2) == SENTENCE_END.encode()
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_text(tokenizer.encode("a")[0]) == "a"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_deltas_of_any_tokens_make_up_the_decoding(tokenizer, data):
    """Random ids: invalid UTF-8 in every way that a model can produce it."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    chunk, skip = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert stream(tokenizer, ids, chunk, skip_special_tokens=skip) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_deltas_of_text_hold_whole_characters(tokenizer, spm, text):
    for each in (tokenizer, spm):
        ids = each.encode(text, add_special_tokens=False)
        detokenizer = Detokenizer(each, skip_special_tokens=False, continues=False)
        deltas = [detokenizer.push([i]) for i in ids]
        assert detokenizer.flush() == ""
        assert "".join(deltas) == each.decode(ids, skip_special_tokens=False)
        assert "\ufffd" not in "".join(deltas) or "\ufffd" in text


def test_a_character_cut_off_at_the_end(tokenizer):
    ids = tokenizer.encode("a", add_special_tokens=False)
    ids += [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0"]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_leading_space(spm):
    ids = spm.encode("abc abc", add_special_tokens=False)
    assert stream(spm, ids) == spm.decode(ids) == "abc abc"
    after_a_prompt = Detokenizer(spm)
    assert after_a_prompt.push(ids) + after_a_prompt.flush() == " abc abc"


def test_words_without_a_decoder(tmp_path):
    plain = tokenizers.Tokenizer(models.WordLevel({"x": 0, "yy": 1, "[U]": 2}, unk_token="[U]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, plain))
    assert stream(tokenizer, [0, 1, 0]) == tokenizer.decode([0, 1, 0]) == "x yy x"


def test_unsupported_decoder(tmp_path):
    plain = tokenizers.Tokenizer(models.WordLevel({"x": 0, "[U]": 1}, unk_token="[U]"))
    plain.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        load_tokenizer(write_tokenizer(tmp_path, plain))


def test_no_tokenizer_and_a_broken_one(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected one of tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_no_code_of_the_checkpoint_is_run(tmp_path):
    path = write_tokenizer(
        tmp_path, byte_level(), auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    )
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    try:
        tokenizer = load_tokenizer(path)
    except CheckpointError:
        pass
    else:
        assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    assert not (tmp_path / "ran").exists()
