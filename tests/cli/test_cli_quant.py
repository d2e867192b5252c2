"""`bench quant` on CPU ranks: the log-likelihood in BF16 is transformers', that in FP8 is near."""

import json
import subprocess
import sys

import pytest
import torch

TEXT = "Once upon a time, far beyond the hills, a miller had three sons and one grey cat. " * 2
CONTEXT, WINDOWS = 16, 2


def crossdock(*args):
    command = [sys.executable, "-m", "crossdock", "bench", "quant", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def reference(checkpoint):
    """Mean log-likelihood of each window."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(checkpoint)(TEXT, return_tensors="pt")["input_ids"][0]
    windows = ids[: WINDOWS * CONTEXT].view(WINDOWS, CONTEXT)
    with torch.inference_mode():
        logprobs = model(windows).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(2, windows[:, 1:, None]).mean((1, 2))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_answers_in_fp8_beside_bf16(checkpoint, tmp_path, device):
    text, out, config = (tmp_path / name for name in ("text.txt", "quant.json", "more.toml"))
    text.write_text(TEXT)
    config.write_text('attention = "torch"\nkv_memory_gib = 0.01\n')
    done = crossdock(
        checkpoint, "--text", text, "--device", device, "--config", config, "--context", CONTEXT,
        "--windows", WINDOWS, "--prompts", 2, "--prompt-len", 5, "--output-len", 3, "--out", out,
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert json.loads(out.read_text()) == document
    cases = {(c["name"], c["shape"]["variant"]): c for c in document["cases"]}
    want = reference(checkpoint)
    bf16, fp8 = (cases["log_likelihood", name] for name in ("bf16", "fp8"))
    assert bf16["tokens"] == fp8["tokens"] == WINDOWS * (CONTEXT - 1)
    assert bf16["mean"] == pytest.approx(want.mean().item(), abs=5e-3)
    assert bf16["median"] == pytest.approx(want.median().item(), abs=1e-2)
    difference = cases["log_likelihood_difference", "fp8 / bf16"]
    assert difference["mean"] == pytest.approx(fp8["mean"] - bf16["mean"], abs=1e-6)
    assert 0 < abs(difference["mean"]) < 0.05
    likeliest, greedy = (cases[name, "fp8 / bf16"] for name in ("same_likeliest", "same_greedy"))
    assert likeliest["n"] == WINDOWS and likeliest["mean"] > 40
    assert greedy["n"] == len(greedy["first_difference"]) == 2
    assert all(c["shape"]["ranks"] == 1 for c in document["cases"])
    cached = cases["log_likelihood_difference", "fp8 kv / bf16"]
    assert cached["mean"] == pytest.approx(
        cases["log_likelihood", "fp8 kv"]["mean"] - bf16["mean"], abs=1e-6
    )
    assert 0 < abs(cached["mean"]) < 0.05
    whole, half = (cases["kv_token", name]["median"] for name in ("bf16", "fp8 kv"))
    assert 0.5 < half / whole < 0.7  # its heads are narrow
    assert cases["weights", "fp8 kv"]["median"] == cases["weights", "bf16"]["median"]


def test_what_cannot_be_compared_is_refused(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("too short")
    done = crossdock(checkpoint, "--text", text, "--device", "cpu")
    assert done.returncode == 2 and "9 tokens, --context asks for 512" in done.stderr
    done = crossdock(checkpoint, "--text", tmp_path / "none", "--device", "cpu")
    assert done.returncode == 2 and "cannot be read" in done.stderr
