"""The demo: serve the storyteller on four CPU ranks, let it tell, and show where the tokens went.

    python recipes/demo.py          serves on until Ctrl-C
    python recipes/demo.py --once   ends after the table

Everything is seen from outside: the server is `crossdock serve`, the rest comes over HTTP.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "checkpoints" / "storyteller"
NAME = "storyteller"
PROMPT = "Once upon a time there was an old miller who had three daughters. The youngest"
MAX_TOKENS = 160
COLD, HOT = (40, 44, 58), (214, 64, 36)
IN_LINE = 16
"""Experts of all ranks in one line of the table."""

Metrics = dict[str, list[tuple[dict[str, str], float]]]
"""Samples by name: labels and value."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve the demo model and show its experts.")
    parser.add_argument("--once", action="store_true", help="end after the table")
    parser.add_argument("--model", default=str(CHECKPOINT), help="another checkpoint")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--port", type=int, default=8000, help="0 takes any free one")
    args = parser.parse_args()
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=100)
    server = start(args.model, args.ranks, args.port)
    try:
        facts = ready(server)
        if facts is None:
            return server.wait() or 1
        tell(console, facts["url"])
        show(console, facts)
        invite(console, facts["url"])
        return 0 if args.once else server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        end(server)


def start(model: str, ranks: int, port: int) -> subprocess.Popen[str]:
    command = ["serve", model, "--ranks", str(ranks), "--device", "cpu", "--port", str(port)]
    return subprocess.Popen(
        [sys.executable, "-m", "crossdock", *command, "--served-model-name", NAME, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={"CROSSDOCK_LOG_LEVEL": "warning", **os.environ},
    )


def ready(server: subprocess.Popen[str]) -> dict[str, Any] | None:
    """What the server says of itself once it can serve; None if it cannot (it has said why)."""
    assert server.stdout is not None
    line = server.stdout.readline()
    facts = json.loads(line) if line else {"error": "it ended"}
    return None if "error" in facts else facts


def end(server: subprocess.Popen[str]) -> None:
    """As Ctrl-C does; in a terminal the server has heard that too, and hearing it twice is well."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(timeout=10)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def tell(console: Console, url: str) -> None:
    """One completion, streamed."""
    body = {
        "model": NAME,
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "temperature": 0.8,
        "top_p": 0.95,
        "seed": 7,
        "stream": True,
    }
    console.print(f"\n[bold]{PROMPT}[/]", end="", soft_wrap=True)
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    console.print(choice["text"], end="", soft_wrap=True, markup=False)
    console.print("\n")


def show(console: Console, facts: dict[str, Any]) -> None:
    """Tokens per expert and rank, and what an MoE layer's parts took."""
    metrics = read_metrics(httpx.get(f"{facts['url']}/metrics", timeout=30).text)
    console.print(load_table(metrics, facts["ranks"]))
    console.print(time_line(metrics))


def load_table(metrics: Metrics, ranks: int) -> Table:
    """A column per rank with the counts of its experts, a few in a line; then the ranks' own."""
    tokens: dict[int, dict[int, int]] = defaultdict(dict)
    for labels, value in metrics["crossdock:expert_tokens_total"]:
        tokens[int(labels["layer"])][int(labels["expert"])] = int(value)
    experts = len(next(iter(tokens.values())))
    each = -(-experts // ranks)
    homes = [range(r * each, min((r + 1) * each, experts)) for r in range(ranks)]
    table = Table(
        title="tokens per expert",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),  # four ranks in 80 columns
        show_edge=False,
    )
    table.add_column("layer", justify="right", min_width=len("layer"))
    for rank, home in enumerate(homes):
        name = f"rank {rank}\nexperts {home[0]}-{home[-1]}" if home else f"rank {rank}\nreplicas"
        table.add_column(name, justify="right", no_wrap=True)
    for layer, counts in sorted(tokens.items()):
        mean = max(sum(counts.values()) / experts, 1e-9)
        table.add_row(str(layer), *(heat(counts, home, mean, ranks) for home in homes))
    table.add_section()
    by_rank = {
        name: {int(labels["rank"]): value for labels, value in metrics[f"crossdock:{name}"]}
        for name in ("rank_tokens_total", "rank_busy_ratio")
    }
    total = sum(by_rank["rank_tokens_total"].values()) or 1.0
    sums = [by_rank["rank_tokens_total"].get(r, 0.0) for r in range(ranks)]
    table.add_row("all", *(f"{n:,.0f} = {n / total:.0%}" for n in sums), style="bold")
    table.add_row("busy", *(f"{by_rank['rank_busy_ratio'].get(r, 0):.0%}" for r in range(ranks)))
    table.caption = "busy: not waiting for others; one rank has the request, and its attention"
    table.caption_justify = "left"
    return table


def heat(counts: dict[int, int], home: range, mean: float, ranks: int) -> Text:
    """The counts of `home`, redder the busier an expert is beside the mean of its layer."""
    text, in_line = Text(), max(1, IN_LINE // ranks)
    for n, expert in enumerate(home):
        text.append("\n" if n and n % in_line == 0 else "")
        hot = min(counts[expert] / mean / 3, 1.0)
        color = ",".join(str(int(a + (b - a) * hot)) for a, b in zip(COLD, HOT, strict=True))
        text.append(f"{counts[expert]:>4}", style=f"white on rgb({color})")
    return text


def time_line(metrics: Metrics) -> str:
    """Means per MoE layer, step and rank. Experts are timed in total, once for each dispatch."""
    calls = metrics["crossdock:dispatch_seconds_count"][0][1] or 1.0
    parts = {labels["part"]: v for labels, v in metrics["crossdock:step_seconds_total"]}
    means = {part: parts.get(part, 0.0) / calls for part in ("dispatch", "experts", "combine")}
    told = ", ".join(f"{part} [bold]{s * 1e6:,.0f} us[/]" for part, s in means.items())
    return f"mean of an MoE layer: {told} (waits included)"


def read_metrics(text: str) -> Metrics:
    """A Prometheus exposition."""
    found: Metrics = defaultdict(list)
    for name, labels, value in re.findall(r"^([\w:]+)(\{.*\})? (\S+)$", text, re.M):
        found[name].append((dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)))
    return found


def invite(console: Console, url: str) -> None:
    body = json.dumps({"model": NAME, "prompt": "The fox said", "max_tokens": 60, "stream": True})
    console.print(f"\nserving at [bold green]{url}[/] (metrics: {url}/metrics); try\n")
    command = f"curl -N {url}/v1/completions -H 'content-type: application/json' -d '{body}'"
    console.print(command, style="cyan", markup=False, soft_wrap=True)
    console.print()


if __name__ == "__main__":
    sys.exit(main())
