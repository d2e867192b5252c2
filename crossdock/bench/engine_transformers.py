"""The child of `bench engine` that runs transformers' `generate`; started by `python -m`."""

import time
from typing import Any

import torch

from crossdock.bench.child import answer_requests
from crossdock.models.hub import resolve_model


def start(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Settings: model, revision, device, dtype, threads, batch."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    device = settings["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = settings["dtype"]
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "auto"
    path = resolve_model(settings["model"], settings["revision"])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    facts = {"threads": torch.get_num_threads(), "dtype": str(model.dtype).removeprefix("torch.")}
    return (model, settings["batch"]), facts


def run(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Greedy, `output_len` tokens for every prompt, in left-padded batches."""
    model, batch = engine
    prompts, length = request["prompts"], request["output_len"]
    begin = time.perf_counter()
    tokens = sum(
        _generate(model, prompts[i : i + batch], length) for i in range(0, len(prompts), batch)
    )
    return {"seconds": time.perf_counter() - begin, "tokens": tokens}


def _generate(model: Any, prompts: list[list[int]], length: int) -> int:
    widest = max(len(p) for p in prompts)
    ids_BT = torch.tensor([[0] * (widest - len(p)) + p for p in prompts], device=model.device)
    mask_BT = torch.tensor(
        [[0] * (widest - len(p)) + [1] * len(p) for p in prompts], device=model.device
    )
    with torch.inference_mode():
        out_BT = model.generate(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
        )
    return len(prompts) * (out_BT.shape[1] - widest)


if __name__ == "__main__":
    answer_requests(start, run, lambda engine: None)
