"""`serve`: ranks and an OpenAI-compatible server over them, until Ctrl-C or SIGTERM."""

from typing import Annotated

import typer

from crossdock.cli.output import JsonFlag, output_of
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


def serve(
    ctx: typer.Context,
    model: Model,
    ranks: Ranks = None,
    tp: TP = None,
    device: Device = None,
    host: Annotated[str | None, typer.Option(help="[default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="0: any free one. [default: 8000]")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What requests call it. [default: MODEL as given]")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Clients must show it; better by CROSSDOCK_API_KEY.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and answer. [default: the model's]")
    ] = None,
    invariant: Invariant = None,
    quantize: Quantize = None,
    kv_cache_dtype: KVCacheDtype = None,
    config: ConfigFile = None,
    revision: Revision = None,
    json: JsonFlag = False,
) -> None:
    """Serves a model over the OpenAI API. With --json the document comes when it is ready."""
    engine, server = gather(
        config,
        model=model,
        ranks=ranks,
        tp=tp,
        device=device,
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_key=api_key,
        max_model_len=max_model_len,
        invariant=invariant,
        quantize=quantize,
        kv_cache_dtype=kv_cache_dtype,
        revision=revision,
    )
    try:
        from crossdock.cli.serving import run

        code = run(engine, server, output_of(ctx))
    except KeyboardInterrupt:  # before the server has taken over; typer would make it a failure
        code = 0
    raise typer.Exit(code)
