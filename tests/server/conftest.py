"""A scripted engine client, and a server over it on a free port."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from crossdock.core import (
    ConfigError,
    EngineConfig,
    GQASpec,
    ModelSpec,
    MoESpec,
    RankLost,
    RequestError,
    RopeSpec,
    SamplingParams,
    ServerConfig,
)
from crossdock.core.messages import Snapshot, Traced
from crossdock.metrics import GatewayMetrics
from crossdock.metrics.rebalances import Rebalances
from crossdock.server import claim_port, create_app
from crossdock.server.run import Server, _Protocol

VOCAB = 300


@dataclass(frozen=True)
class FakeToken:
    token: str
    bytes: tuple[int, ...]
    logprob: float
    token_id: int = 0
    top: tuple = ()


@dataclass(frozen=True)
class FakeUpdate:
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[FakeToken, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    error: str | None = None


class ByteTokenizer:
    """One token per byte; chats end with a line for the assistant."""

    eos_token_ids = (299,)
    vocab_size = VOCAB

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [256] * add_special_tokens + list(text.encode())

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def apply_chat_template(self, messages, add_generation_prompt=True, **kwargs) -> list[int]:
        if any("forbidden" in m["content"] for m in messages):
            raise RequestError("the chat template refuses them: roles must alternate", "messages")
        text = "".join(f"{name} {value}\n" for name, value in kwargs.items())
        text += "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return self.encode(text + "assistant:" * add_generation_prompt)


SPEC = ModelSpec(
    architecture="Test",
    num_layers=2,
    hidden_size=8,
    intermediate_size=8,
    vocab_size=VOCAB,
    attention=GQASpec(1, 1, 8),
    rope=RopeSpec(8, 10000.0),
    moe=MoESpec(num_experts=4, top_k=2, intermediate_size=8),
    moe_layers=(1,),
    rms_norm_eps=1e-6,
    max_position=128,
)


def words(prompt_ids: tuple[int, ...], params: SamplingParams, index: int) -> list[FakeUpdate]:
    """One token an update: ` w0`, ` w1` ... until max_tokens."""
    updates = []
    for i in range(params.max_tokens or 1):
        text = f" w{i}"
        chosen = FakeToken(text, tuple(text.encode()), -0.5 - i)
        other = FakeToken(" other", tuple(b" other"), float("-inf"))
        logprobs = () if params.logprobs is None else (replace(chosen, top=(chosen, other)),)
        updates.append(FakeUpdate(index, text, (i,), logprobs, num_cached_tokens=2))
    updates[-1] = replace(updates[-1], finish_reason="length")
    return updates


class FakeRecording:
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def start(self) -> None:
        self.asked.append("start")

    def stop(self) -> None:
        self.asked.append("stop")

    def reset(self) -> None:
        self.asked.append("reset")

    def dump(self) -> dict[str, Any]:
        if "start" not in self.asked:
            raise ConfigError("the recording of expert loads is empty")
        return {"windows": [{"steps": 3, "tokens": [[1, 2, 3, 4]]}]}

    def state(self) -> dict[str, Any]:
        return {"recording": self.asked[-1] != "stop", "windows": 0}


class FakeBalancer:
    """`act` plays a rebalance; called with the policy."""

    def __init__(self) -> None:
        self.totals = Rebalances(1.1)
        self.act: Callable[[str | None], Any] = lambda policy: None

    def rebalance(self, policy: str | None = None) -> Any:
        return self.act(policy)


class FakeTraces:
    """`act` plays a trace; called with the steps and the timeout."""

    def __init__(self) -> None:
        self.act: Callable[[int, float], list[Traced]] = lambda steps, timeout: []
        self.finished = threading.Event()

    def record(self, steps: int, timeout: float) -> list[Traced]:
        return self.act(steps, timeout)

    def finish(self) -> None:
        self.finished.set()


@dataclass
class FakeClient:
    """Plays `script` for every choice from threads of its own; with `permits`, an update each."""

    script: Callable[..., list[FakeUpdate]] = words
    permits: threading.Semaphore | None = None
    max_model_len: int = 128
    model_name: str = "storyteller"
    failure: str | None = None
    ceilings: None = None
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    submitted: list[Any] = field(default_factory=list)
    aborts: queue.Queue = field(default_factory=queue.Queue)
    snapshot_list: list[Snapshot] = field(default_factory=list)
    recording: FakeRecording = field(default_factory=FakeRecording)
    balancer: FakeBalancer = field(default_factory=FakeBalancer)
    traces: FakeTraces = field(default_factory=FakeTraces)
    closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.config, self.spec = EngineConfig(model="m", ranks=2), SPEC
        self._open: dict[str, tuple[threading.Event, list[list[FakeUpdate]]]] = {}

    def submit(self, request_id, prompt_ids, params, on_update) -> None:
        if self.failure is not None:
            raise RankLost(self.failure)
        assert request_id not in self._open
        stop = threading.Event()
        self.submitted.append(SimpleNamespace(id=request_id, prompt=prompt_ids, params=params))
        scripts = [self.script(prompt_ids, params, index) for index in range(params.n)]
        self._open[request_id] = stop, scripts
        threading.Thread(
            target=self._play, args=(request_id, scripts, on_update, stop), daemon=True
        ).start()

    def _play(self, request_id, scripts, on_update, stop) -> None:
        while any(scripts):
            for script in scripts:
                if script:
                    if self.permits is not None:
                        self.permits.acquire()
                    if stop.is_set():
                        return
                    if sum(map(len, scripts)) == 1:
                        self._open.pop(request_id, None)
                    on_update(script.pop(0))

    def abort(self, request_id: str) -> None:
        self.aborts.put(request_id)
        if request_id in self._open:
            self._open.pop(request_id)[0].set()
        if self.permits is not None:
            self.permits.release()

    def snapshots(self) -> list[Snapshot]:
        return self.snapshot_list

    def close(self) -> None:
        self.closed.set()

    def num_open(self) -> int:
        scripts = [script for _, scripts in list(self._open.values()) for script in scripts]
        return sum(map(bool, scripts))


@contextmanager
def running(client: FakeClient | None, metrics: GatewayMetrics | None = None, **settings: Any):
    config = ServerConfig(**settings)
    metrics = metrics or GatewayMetrics()
    app = create_app(client, config, metrics)
    sock = claim_port("127.0.0.1", 0)
    port = sock.getsockname()[1]
    server = Server(
        uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        ),
        app.state.service,
    )
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=60) as http:
            yield SimpleNamespace(
                url=url,
                port=port,
                http=http,
                service=app.state.service,
                server=server,
                thread=thread,
                client=client,
            )
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def fakes() -> SimpleNamespace:
    """The classes of this file, for scripts of a test's own."""
    return SimpleNamespace(Client=FakeClient, Update=FakeUpdate, Token=FakeToken, file=__file__)


@pytest.fixture
def serve() -> Callable[..., Any]:
    return running


@pytest.fixture
def server() -> Iterator[SimpleNamespace]:
    with running(FakeClient()) as running_server:
        yield running_server
