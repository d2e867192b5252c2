"""`bench startup`: what a server costs before and between requests.

From the command to /health 200; the processor time of all its processes while nobody asks; the
resident memory of its ranks.
"""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crossdock.bench.report import Case, Report, case_of, cpu_name
from crossdock.core import CrossdockError, UserError
from crossdock.server import claim_port

_POLL_S = 0.05
_LIMIT_S, _END_S = 600.0, 30.0
_TICKS = os.sysconf("SC_CLK_TCK")
MIB = 2**20


@dataclass(frozen=True)
class StartupOptions:
    model: str
    ranks: tuple[int, ...] = (4,)
    repeats: int = 5
    idle_s: float = 10.0
    target_s: float | None = None


@dataclass(frozen=True)
class Start:
    """One start: seconds to ready, cores used while idle, bytes resident in each rank."""

    ready_s: float
    idle_cores: float
    rank_bytes: list[int]


def run_startup(
    options: StartupOptions, on_progress: Callable[[str], None] = lambda what: None
) -> dict[int, list[Start]]:
    """Starts by number of ranks, which take turns.

    Raises:
        UserError, CrossdockError: the server ended before it was ready; gives its last words.
    """
    starts: dict[int, list[Start]] = {ranks: [] for ranks in options.ranks}
    for turn in range(options.repeats):
        for ranks in options.ranks:
            on_progress(f"{turn + 1} of {options.repeats}: {_name(ranks)}")
            starts[ranks].append(_start(options, ranks))
    return starts


def _start(options: StartupOptions, ranks: int) -> Start:
    with claim_port("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "crossdock", "serve", options.model]
    command += ["--ranks", str(ranks), "--port", str(port)]
    began = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as server:
        try:
            ready_s = _wait_ready(server, port, began)
            family = [server.pid, *_children(server.pid)]
            before = sum(map(_cpu_seconds, family))
            time.sleep(options.idle_s)
            idle = (sum(map(_cpu_seconds, family)) - before) / options.idle_s
            return Start(ready_s, idle, [_resident(pid) for pid in family[1:]])
        finally:
            _end(server)


def _wait_ready(server: subprocess.Popen[bytes], port: int, began: float) -> float:
    url = f"http://127.0.0.1:{port}/health"
    while (taken := time.perf_counter() - began) < _LIMIT_S:
        if server.poll() is not None:
            said = server.stderr.read().decode(errors="replace") if server.stderr else ""
            mistake = UserError if server.returncode == UserError.exit_code else CrossdockError
            raise mistake(said.strip().removeprefix("crossdock: error: "))
        try:
            with urllib.request.urlopen(url, timeout=1):
                return time.perf_counter() - began
        except (urllib.error.URLError, OSError):
            time.sleep(_POLL_S)
    raise CrossdockError(f"the server was not ready after {taken:.0f} s")


def _end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGINT)
    try:
        server.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        server.kill()


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rsplit(")", 1)[1].split()[1]) == parent:
                found.append(int(entry.name))
    return found


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _name(ranks: int) -> str:
    return f"{ranks} rank" + "s" * (ranks > 1)


def report(options: StartupOptions, starts: dict[int, list[Start]], command: str) -> Report:
    cases: list[Case] = []
    for ranks, of in starts.items():
        shape = {"variant": _name(ranks), "model": options.model, "ranks": ranks}
        ready = [start.ready_s for start in of]
        cases.append(case_of("start_to_ready", ready, "s", "lower", shape, target=options.target_s))
        idle = [100 * start.idle_cores for start in of]
        cases.append(case_of("idle_processor", idle, "% of a core", "lower", shape, target=3.0))
        memory = [resident / MIB for start in of for resident in start.rank_bytes]
        cases.append(case_of("rank_resident_memory", memory, "MiB", "lower", shape))
    return Report(command, cpu_name(), tuple(cases))
