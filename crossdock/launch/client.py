"""The gateway's side of an engine: its ranks, what they are asked, and what they say."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np

from crossdock.comm import Board
from crossdock.control import Reading
from crossdock.core import (
    CrossdockError,
    EngineConfig,
    ModelSpec,
    Placement,
    RankLost,
    SamplingParams,
    UserError,
)
from crossdock.core.ceilings import Ceilings, read_rows
from crossdock.core.messages import (
    Failure,
    Outputs,
    Progress,
    Ready,
    Rebalanced,
    Report,
    Snapshot,
    Stop,
    Traced,
    Wake,
)
from crossdock.engine import initial_placement
from crossdock.launch.cluster import Cluster
from crossdock.launch.opened import OnUpdate, Submission
from crossdock.launch.output import Update
from crossdock.launch.rebalance import Balancer
from crossdock.launch.rebalance_loads import LoadRecording
from crossdock.launch.rebalance_ranks import Moves
from crossdock.launch.requests import Requests
from crossdock.launch.traces import Traces
from crossdock.models.tokenizer import Tokenizer

OnProgress = Callable[[int, int, int], None]
"""(rank, done, total) while weights load."""


class EngineClient:
    """Thread-safe. Updates are delivered from the client's reader threads; a request whose
    `on_update` raises is dropped."""

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
        self.sampling_defaults: dict[str, Any] = {}
        self.info: list[dict[str, Any]] = [{} for _ in range(config.ranks)]
        self.failure: str | None = None
        self.on_failure: Callable[[str], None] = lambda message: None
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ready: set[int] = set()
        self._heard = time.monotonic()
        self._user_error = self._closed = False
        self._wave = self._reports = 0
        self._process = os.getpid()
        self._snapshots: dict[int, Snapshot] = {}
        self._moves = Moves(initial_placement(config, spec))
        self.balancer = Balancer(self)
        self.recording = LoadRecording(self)
        self._cluster = Cluster(config, self._receive, self._lost, fds)
        self._requests = Requests(
            config, spec, max_model_len, self._cluster.send, self._wake, self._check_open
        )
        self.traces = Traces(config.ranks, self._cluster.broadcast)
        self._cluster.start()

    # -- starting and ending ---------------------------------------------------------------------

    def wait_ready(self, silence_s: float, board: Board) -> None:
        """Returns once every rank is ready. `board`: where they leave their heartbeats.

        Raises:
            UserError, CrossdockError: a rank failed, its heart stopped for longer than the deadline
                of a step, or none was heard of for `silence_s`.
        """
        with self._changed:
            while len(self._ready) < self.config.ranks and self.failure is None:
                self._changed.wait(timeout=1.0)
                missing = sorted(set(range(self.config.ranks)) - self._ready)
                if missing and (stopped := self._stopped(board)):
                    self.failure = f"lost while loading: {stopped}"
                if missing and time.monotonic() - self._heard > silence_s:
                    self.failure = f"ranks {missing} said nothing for {silence_s:g} s at the start"
        if self.failure is not None:
            self.close()
            raise (UserError if self._user_error else CrossdockError)(self.failure)
        self._requests.ready(min(rank["kv_tokens"] for rank in self.info))
        threading.Thread(target=self._watch, args=(board,), daemon=True).start()
        self.balancer.start()

    def _stopped(self, board: Board) -> str | None:
        """A rank whose heart has not beaten for longer than the deadline of a step."""
        for rank in range(self.config.ranks):
            if self.config.deadline_s < board.heartbeat_age(rank) < inf:
                return board.describe(rank)
        return None

    def _watch(self, board: Board) -> None:
        """While serving. A lone rank, or ranks that sleep, have no other rank to miss them."""
        while not self._cluster.closing.wait(min(1.0, self.config.deadline_s / 4)):
            if stopped := self._stopped(board):
                self._fail(f"lost: {stopped}", user_error=False)

    def close(self) -> None:
        """Ends all rank processes; open requests end with finish_reason "abort"."""
        self.balancer.close()
        self.traces.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._cluster.close(None if self.failure else Stop())
        self._requests.end_all(Update(0, finish_reason="abort"))

    @property
    def tokenizer(self) -> Tokenizer:
        return self._requests.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self._requests.tokenizer = tokenizer

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
            CrossdockError: it was closed.
        """
        self.submit_all([Submission(request_id, prompt_ids, params, on_update)])

    def submit_all(self, submissions: Sequence[Submission]) -> None:
        """As `submit` of each, but all or, where one is refused, none; ranks that sleep begin with
        full steps."""
        self._requests.submit(submissions)

    def abort(self, request_id: str) -> None:
        """Stops all choices of a request; unknown ids (it may just have ended) are no error."""
        self._requests.abort(request_id)

    def _wake(self) -> None:
        """All ranks hear of every wave: a rank may sleep only once all have seen the same one."""
        with self._lock:
            self._wave += 1
            self._cluster.broadcast(Wake(self._wave))

    def num_open(self) -> int:
        """Choices of all requests that have not ended."""
        return len(self._requests)

    def snapshots(self, timeout: float = 5.0) -> list[Snapshot]:
        """The metrics of every rank, fresh if they answer in time, which they do between two steps,
        else the last heard."""
        return self._snapshots_within(timeout)[1]

    def _snapshots_within(self, timeout: float) -> tuple[bool, list[Snapshot]]:
        """Whether all are fresh, and those there are."""
        with self._changed:
            number = self._reports = self._reports + 1

            def fresh() -> bool:
                told = [s for s in self._snapshots.values() if s.number >= number]
                return len(told) == self.config.ranks

            if not self._over:
                self._cluster.broadcast(Report(number))
                self._changed.wait_for(lambda: self._over or fresh(), timeout)
            return fresh(), [self._snapshots[rank] for rank in sorted(self._snapshots)]

    @property
    def _over(self) -> bool:
        return self._closed or self.failure is not None

    def _check_open(self) -> None:
        """Raises RankLost if the engine has failed, CrossdockError if it was closed, or belongs to
        the process that this one is a fork of: the threads that serve it are only there."""
        if os.getpid() != self._process:
            raise CrossdockError(
                f"the engine belongs to process {self._process}, not to its fork {os.getpid()}; "
                "ask there, or start one here"
            )
        if self.failure is not None:
            raise RankLost(self.failure)
        if self._closed:
            raise CrossdockError("the engine is closed")

    # -- placements ------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        return self._moves.placement

    @property
    def expert_bytes(self) -> int:
        """Of one expert in one layer, as the ranks hold it."""
        return self.info[0]["expert_bytes"]

    @property
    def ceilings(self) -> Ceilings | None:
        """What a rank's device reaches; None where nobody knows."""
        found = self.info[0]["ceilings"]
        return None if found is None else Ceilings(**found)

    @property
    def read_rows(self) -> float:
        """Rows whose products with an expert take as long as reading it; 0: unknown."""
        flops = 6 * self.spec.hidden_size * self.spec.moe.intermediate_size
        return read_rows(self.expert_bytes, flops, self.ceilings)

    def reading(self) -> Reading:
        """The ranks' totals now.

        Raises:
            RankLost, CrossdockError: the engine is failed or closed, or a rank did not answer.
        """
        fresh, snapshots = self._snapshots_within(self.config.deadline_s)
        self._check_open()
        if not fresh:
            raise CrossdockError("not all ranks reported their loads in time")
        return Reading.of(time.monotonic(), snapshots)

    def rebalance(self, slot_expert_LP: np.ndarray, timeout: float | None = None) -> Rebalanced:
        """Moves to another placement while serving, and returns when that has ended: what of it
        ended least well on any rank.

        Raises:
            Busy: another move is under way.
            ConfigError: it is no placement of these layers and slots.
            RankLost, CrossdockError: the engine is failed or closed, or did not end in time.
        """
        with self._changed:
            self._check_open()
            message, result = self._moves.begin(slot_expert_LP, self._wave + 1)
            self._wave += 1
            self._cluster.broadcast(message)
            self._changed.wait_for(lambda: self._over or result.done(), timeout)
            self._check_open()
            if not result.done():
                missing = self._moves.missing()
                raise CrossdockError(f"ranks {missing} did not end a rebalance in {timeout:g} s")
            return result.result()

    # -- what the ranks say ----------------------------------------------------------------------

    def _receive(self, rank: int, message: Any) -> None:
        self._heard = time.monotonic()
        match message:
            case Outputs(_, outputs):
                for output in outputs:
                    self._requests.deliver(output)
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
                    self._changed.notify_all()
            case Rebalanced():
                with self._changed:
                    self._moves.ended(message)
                    self._changed.notify_all()
            case Traced():
                self.traces.ended(message)
            case Failure():
                self._fail(_describe(message), message.user_error)

    def _lost(self, rank: int, why: str) -> None:
        self._fail(why, user_error=False)

    def _fail(self, message: str, user_error: bool) -> None:
        """The first failure is the cause; the ones that follow are its echo."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure, self._user_error = message, user_error
            self._changed.notify_all()
        self.traces.close()
        self._requests.end_all(Update(0, finish_reason="error", error=message))
        threading.Thread(target=self._cluster.close, daemon=True).start()
        self.on_failure(message)


def _describe(failure: Failure) -> str:
    return failure.message + (f"\n{failure.trace}" if failure.trace else "")
