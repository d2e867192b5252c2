"""What `serve` does once its settings are known."""

from rich.markup import escape

from crossdock.cli.output import Output
from crossdock.cli.starting import describe, lines_of, start_engine
from crossdock.core import EngineConfig, ServerConfig
from crossdock.launch import EngineClient
from crossdock.server import claim_port, run_server


def run(engine: EngineConfig, server: ServerConfig, output: Output) -> int:
    """Serves until a signal (0) or a lost rank (1). The port is taken before anything is loaded."""
    sock = claim_port(server.host, server.port)
    started: list[EngineClient] = []

    def start() -> EngineClient:
        client = start_engine(engine, output)
        started.append(client)
        return client

    def on_ready(url: str) -> None:
        facts = describe(started[0])
        name = server.served_model_name or facts["model"]
        for line in lines_of(facts):
            output.notes.print(line, markup=False, soft_wrap=True)
        loaded = f"loaded in {facts['load_seconds']:.1f} s"
        output.notes.print(
            f"[bold green]serving[/] {escape(name)} at {url} ({loaded}); Ctrl-C ends it",
            soft_wrap=True,
        )
        if output.as_json:
            output.result({"url": url, "served_model_name": name, **facts})

    try:
        return run_server(start, server, sock, on_ready)
    finally:
        for client in started:
            client.close()
