"""The gateway's side of an engine: open requests, which rank runs them, and how they end."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crossdock.core import (
    CrossdockError,
    EngineConfig,
    ModelSpec,
    RankLost,
    Request,
    RequestError,
    SamplingParams,
    TokenOutput,
    UserError,
)
from crossdock.core.messages import (
    Abort,
    Add,
    Failure,
    Outputs,
    Progress,
    Ready,
    Report,
    Snapshot,
    Stop,
    Wake,
)
from crossdock.launch.cluster import Cluster
from crossdock.launch.output import Choice, Update
from crossdock.models.tokenizer import Tokenizer
from crossdock.scheduler import Router

OnUpdate = Callable[[Update], None]
OnProgress = Callable[[int, int, int], None]
"""(rank, done, total) while weights load."""


@dataclass
class _Open:
    """A request in flight: everything needed to run it again elsewhere."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    on_update: OnUpdate
    choices: dict[int, Choice] = field(default_factory=dict)


class EngineClient:
    """Thread-safe. Updates are delivered from the client's reader threads."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        max_model_len: int,
        model_name: str,
        fds: dict[str, int],
        on_progress: OnProgress | None = None,
    ):
        self.spec, self.config = spec, config
        self.max_model_len, self.model_name = max_model_len, model_name
        self.tokenizer: Tokenizer
        self.info: list[dict[str, Any]] = [{} for _ in range(config.ranks)]
        self.failure: str | None = None
        self.on_failure: Callable[[str], None] = lambda message: None
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ready: set[int] = set()
        self._heard = time.monotonic()
        self._user_error = False
        self._wave = 0
        self._open: dict[str, _Open] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._fresh: set[int] = set()
        self._router = Router(
            config.ranks,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            namespace=config.model,
            prefix_caching=config.prefix_caching,
        )
        self._cluster = Cluster(config, self._receive, self._lost, fds)

    # -- starting and ending ---------------------------------------------------------------------

    def wait_ready(self, silence_s: float) -> None:
        """Returns once every rank is ready.

        Raises:
            UserError, CrossdockError: a rank failed, or none was heard of for `silence_s`.
        """
        with self._changed:
            while len(self._ready) < self.config.ranks and self.failure is None:
                if not self._changed.wait(timeout=1.0) and (
                    time.monotonic() - self._heard > silence_s
                ):
                    missing = sorted(set(range(self.config.ranks)) - self._ready)
                    self.failure = f"ranks {missing} said nothing for {silence_s:g} s at the start"
        if self.failure is not None:
            self.close()
            raise (UserError if self._user_error else CrossdockError)(self.failure)

    def close(self) -> None:
        """Ends all rank processes; open requests end with finish_reason "abort"."""
        self._cluster.close(None if self.failure else Stop())
        self._end_all(Update(0, finish_reason="abort"))

    @property
    def pids(self) -> list[int]:
        return self._cluster.pids

    # -- requests --------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_update: OnUpdate,
    ) -> None:
        """Starts `params.n` continuations of `prompt_ids`.

        Raises:
            RequestError: empty prompt, ids outside the vocabulary, or too long for the model.
            RankLost: the engine has failed.
        """
        prompt = tuple(prompt_ids)
        params = self._check(prompt, params)
        opened = _Open(prompt, params, on_update)
        with self._lock:
            if self.failure is not None:
                raise RankLost(self.failure)
            if request_id in self._open:
                raise RequestError(f"request id {request_id!r} is already in use")
            self._open[request_id] = opened
            for index in range(params.n):
                self._start_choice(request_id, index, opened)

    def _start_choice(self, request_id: str, index: int, opened: _Open) -> None:
        params = opened.params
        if params.n > 1 and params.seed is not None:
            params = replace(params, seed=(params.seed + index) % 2**63)
        name = f"{request_id}/{index}"
        rank = self._router.route(name, opened.prompt_ids, params.max_tokens or 0)
        opened.choices[index] = Choice(index, rank, params, self.tokenizer)
        digest = hashlib.blake2b(f"{self.config.seed}|{name}".encode(), digest_size=8).digest()
        request = Request(
            name,
            opened.prompt_ids,
            params,
            eos_token_ids=self.tokenizer.eos_token_ids,
            key=int.from_bytes(digest, "little"),
        )
        # All ranks hear of every wave: a rank may sleep only once all have seen the same one.
        self._wave += 1
        for other in range(self.config.ranks):
            message = Add(request, self._wave) if other == rank else Wake(self._wave)
            self._cluster.send(other, message)

    def _check(self, prompt: tuple[int, ...], params: SamplingParams) -> SamplingParams:
        vocab = self.spec.vocab_size
        if not prompt:
            raise RequestError("the prompt is empty", "prompt")
        if min(prompt) < 0 or max(prompt) >= vocab:
            bad = next(t for t in prompt if not 0 <= t < vocab)
            raise RequestError(f"token id {bad} is outside the vocabulary of {vocab}", "prompt")
        room = self.max_model_len - len(prompt)
        wanted = params.max_tokens if params.max_tokens is not None else 1
        if room < wanted:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and {wanted} are to be generated, "
                f"{len(prompt) + wanted} in all; the context holds {self.max_model_len}",
                "max_tokens" if room > 0 else "prompt",
            )
        for token, _ in params.logit_bias:
            if not 0 <= token < vocab:
                raise RequestError(
                    f"logit_bias names token {token}; the vocabulary has {vocab}", "logit_bias"
                )
        return replace(params, max_tokens=room) if params.max_tokens is None else params

    def abort(self, request_id: str) -> None:
        """Stops all choices of a request; unknown ids (it may just have ended) are no error."""
        with self._lock:
            opened = self._open.pop(request_id, None)
            for index in list(opened.choices) if opened else []:
                self._stop_choice(request_id, index, opened)

    def _stop_choice(self, request_id: str, index: int, opened: _Open | None) -> None:
        assert opened is not None
        choice = opened.choices.pop(index)
        self._router.release(f"{request_id}/{index}")
        self._cluster.send(choice.rank, Abort(f"{request_id}/{index}"))

    def num_open(self) -> int:
        return len(self._open)

    def snapshots(self, timeout: float = 0.5) -> list[Snapshot]:
        """The metrics of every rank, fresh if they answer in time, else the last heard."""
        with self._changed:
            if self.failure is None:
                self._fresh.clear()
                self._cluster.broadcast(Report())
                self._changed.wait_for(lambda: len(self._fresh) == self.config.ranks, timeout)
            return [self._snapshots[rank] for rank in sorted(self._snapshots)]

    # -- what the ranks say ----------------------------------------------------------------------

    def _receive(self, rank: int, message: Any) -> None:
        self._heard = time.monotonic()
        match message:
            case Outputs(_, outputs):
                for output in outputs:
                    self._deliver(output)
            case Progress(_, _, done, total):
                if self._on_progress is not None:
                    self._on_progress(rank, done, total)
            case Ready(_, info):
                with self._changed:
                    self.info[rank] = info
                    self._ready.add(rank)
                    self._changed.notify_all()
            case Snapshot():
                with self._changed:
                    self._snapshots[rank] = message
                    self._fresh.add(rank)
                    self._changed.notify_all()
            case Failure():
                self._fail(_describe(message), message.user_error)

    def _deliver(self, output: TokenOutput) -> None:
        request_id, _, index = output.request_id.rpartition("/")
        with self._lock:
            opened = self._open.get(request_id)
            choice = opened.choices.get(int(index)) if opened else None
            if opened is None or choice is None:
                return  # aborted meanwhile
            if choice.is_new and output.tokens:
                self._router.started(output.request_id)
        # Only this rank's reader thread touches the choice, so the text needs no lock.
        update = choice.push(output)
        if update.finish_reason is not None:
            with self._lock:
                if opened.choices.pop(choice.index, None) is None:
                    return
                self._router.release(output.request_id)
                if output.finish_reason is None:  # a stop string, which ranks know nothing of
                    self._cluster.send(choice.rank, Abort(output.request_id))
                if not opened.choices:
                    self._open.pop(request_id, None)
        opened.on_update(update)

    def _lost(self, rank: int, why: str) -> None:
        self._fail(why, user_error=False)

    def _fail(self, message: str, user_error: bool) -> None:
        """The first failure is the cause; the ones that follow are its echo."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure, self._user_error = message, user_error
            self._changed.notify_all()
        self._end_all(Update(0, finish_reason="error", error=message))
        threading.Thread(target=self._cluster.close, daemon=True).start()
        self.on_failure(message)

    def _end_all(self, update: Update) -> None:
        with self._lock:
            ended, self._open = self._open, {}
        for opened in ended.values():
            for index in opened.choices:
                opened.on_update(replace(update, index=index))


def _describe(failure: Failure) -> str:
    return failure.message + (f"\n{failure.trace}" if failure.trace else "")
