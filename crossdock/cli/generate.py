"""`generate`: one prompt, one answer, no server."""

import sys
import time
from dataclasses import replace
from queue import SimpleQueue
from typing import Annotated, Any

import typer

from crossdock.cli.output import JsonFlag, Output, output_of
from crossdock.cli.settings import (
    TP,
    ConfigFile,
    Device,
    Invariant,
    KVCacheDtype,
    Model,
    Quantize,
    Ranks,
    Revision,
    gather,
)
from crossdock.core import ConfigError, CrossdockError, SamplingParams


def generate(
    ctx: typer.Context,
    model: Model,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue. [default: read from stdin]")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="At most so many new tokens.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token. [default: the model's own]")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Share of probability to choose from. [default: the model's own]"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    ranks: Ranks = None,
    tp: TP = None,
    device: Device = None,
    invariant: Invariant = None,
    quantize: Quantize = None,
    kv_cache_dtype: KVCacheDtype = None,
    config: ConfigFile = None,
    revision: Revision = None,
    json: JsonFlag = False,
) -> None:
    """Continues a prompt and streams the text."""
    from crossdock.cli.starting import start_engine

    output = output_of(ctx)
    said: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
    given = {name: value for name, value in said.items() if value is not None}
    params = SamplingParams(max_tokens=max_tokens, seed=seed, **given)
    engine, _ = gather(
        config,
        model=model,
        ranks=ranks,
        tp=tp,
        device=device,
        invariant=invariant,
        quantize=quantize,
        kv_cache_dtype=kv_cache_dtype,
        revision=revision,
    )
    text = _prompt(prompt)
    client = start_engine(engine, output)
    try:
        params = replace(params, **{**client.sampling_defaults, **given})
        document = _run(client, text, params, output)
    finally:
        client.close()
    output.result(document)


def _prompt(given: str | None) -> str:
    if given is not None:
        return given
    if sys.stdin.isatty():
        raise ConfigError("no prompt: give --prompt TEXT, or pipe it to stdin")
    return sys.stdin.read()


def _run(client: Any, text: str, params: SamplingParams, output: Output) -> dict[str, Any]:
    """Streams to stdout, unless that is kept for the document. Returns the document."""
    prompt_ids = client.tokenizer.encode(text)
    updates: list[Any] = []
    times: list[float] = []
    # Written from here: whoever reads may have gone, and that is not for the engine's threads.
    coming: SimpleQueue[tuple[float, Any]] = SimpleQueue()
    start = time.perf_counter()
    client.submit(
        "generate", prompt_ids, params, lambda update: coming.put((time.perf_counter(), update))
    )
    while not updates or updates[-1].finish_reason is None:
        at, update = coming.get()
        times.append(at)
        updates.append(update)
        if not output.as_json:
            output.stdout.write(update.text)
            output.stdout.flush()
    if not output.as_json:
        output.stdout.write("\n")
    if updates[-1].error is not None:
        raise CrossdockError(updates[-1].error)
    token_ids = [token for update in updates for token in update.token_ids]
    return {
        "model": client.model_name,
        "prompt": text,
        "prompt_tokens": len(prompt_ids),
        "text": "".join(update.text for update in updates),
        "token_ids": token_ids,
        "finish_reason": updates[-1].finish_reason,
        "ttft_seconds": times[0] - start,
        "seconds": times[-1] - start,
    }
