"""The requests that are open: which group runs each, what its ranks are told, and how it ends."""

import itertools
import logging
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from crossdock.core import EngineConfig, ModelSpec, RequestError, TokenOutput
from crossdock.core.messages import Abort, Add
from crossdock.launch.checks import check_request
from crossdock.launch.opened import Opened, Submission
from crossdock.launch.output import Choice, Update
from crossdock.models.tokenizer import Tokenizer
from crossdock.scheduler import Router

log = logging.getLogger(__name__)


class Requests:
    """Thread-safe. A request whose `on_update` raises is dropped.

    Args:
        send: to ranks; never blocks.
        wake: ranks that sleep.
        check: raises where the engine takes no more requests.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        max_model_len: int,
        send: Callable[[Iterable[int], Any], None],
        wake: Callable[[], None],
        check: Callable[[], None],
    ):
        self.tokenizer: Tokenizer
        self._config, self._spec, self._max_model_len = config, spec, max_model_len
        self._send, self._wake, self._check = send, wake, check
        self._lock = threading.Lock()
        self._serials = itertools.count()
        self._open: dict[str, Opened] = {}
        self._router = Router(
            config.groups,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            namespace=config.model,
            prefix_caching=config.prefix_caching,
        )

    def ready(self, kv_tokens: int) -> None:
        """`kv_tokens`: that a rank's KV holds; what was sent before is no longer there."""
        self._router.resize(kv_tokens // self._config.page_size)

    def __len__(self) -> int:
        """Choices that are open: what the ranks call requests."""
        return self._router.num_open

    def submit(self, submissions: Sequence[Submission]) -> None:
        """All of them or, where one is refused, none. Ranks that sleep begin when each has enough
        for two full steps: beginning with the prompt that came first would cost a step more.

        Raises:
            RequestError: a prompt or a parameter is invalid, or an id in use.
        """
        opened = [self._checked(each) for each in submissions]
        config, tokens, choices = self._config, 0, 0
        try:
            for each in opened:
                digests = self._router.page_digests(each.prompt_ids)
                with self._lock:
                    self._start(each, digests)
                tokens += len(each.prompt_ids) * each.params.n
                choices += each.params.n
                full = tokens >= 2 * config.max_num_batched_tokens * config.groups
                if full or choices >= config.max_num_seqs * config.groups:
                    self._wake()
                    tokens = choices = 0
        except BaseException:
            with self._lock:
                for each in opened:
                    self._drop(each)
            raise
        finally:
            self._wake()

    def _checked(self, wanted: Submission) -> Opened:
        name, prompt_ids, params, on_update = wanted
        if not isinstance(name, str):  # ranks know texts alone, and would speak of another
            raise RequestError(f"a request id is a text, got {name!r}")
        try:
            prompt = tuple(map(operator.index, prompt_ids))  # numpy's integers do not travel
        except TypeError as error:
            raise RequestError(f"token ids are integers: {error}", "prompt") from None
        params = check_request(prompt, params, self._spec.vocab_size, self._max_model_len)
        return Opened(name, next(self._serials), prompt, params, on_update)

    def _start(self, opened: Opened, digests: Sequence[bytes]) -> None:
        """With the lock held: whoever ends all requests finds this one, or it is not started."""
        self._check()
        if opened.id in self._open:
            raise RequestError(f"request id {opened.id!r} is already in use")
        self._open[opened.id] = opened
        for i in range(opened.params.n):
            params, name = opened.params_of(i), opened.name(i)
            group = self._router.route(name, opened.prompt_ids, params.max_tokens or 0, digests)
            opened.choices[i] = Choice(i, group, params, self.tokenizer)
            request = opened.request(i, self.tokenizer.eos_token_ids, self._config.seed)
            self._tell(group, Add(request))

    def _tell(self, group: int, message: Any) -> None:
        """With the lock held: the ranks of a group must hear of everything in the same order."""
        tp = self._config.tp
        self._send(range(group * tp, (group + 1) * tp), message)

    def abort(self, request_id: str) -> None:
        """Stops all choices of a request; unknown ids (it may just have ended) are no error."""
        with self._lock:
            opened = self._open.get(request_id)
            if opened is not None:
                self._drop(opened)

    def _drop(self, opened: Opened) -> None:
        """With the lock held."""
        if self._open.get(opened.id) is opened:
            del self._open[opened.id]
        for index in range(opened.params.n):  # one may have been routed, and be no choice yet
            self._router.release(opened.name(index))
        for index, choice in opened.choices.items():
            self._tell(choice.group, Abort(opened.name(index)))
        opened.choices.clear()

    def deliver(self, output: TokenOutput) -> None:
        """What a rank says of one; from the thread that reads for this rank."""
        request_id, serial, index = output.request_id.rsplit("/", 2)
        with self._lock:
            opened = self._open.get(request_id)
            if opened is None or opened.serial != int(serial):
                return  # aborted meanwhile
            choice = opened.choices.get(int(index))
            if choice is None:
                return
            if choice.is_new and output.tokens:
                self._router.started(output.request_id)
        # Only this rank's reader thread touches the choice, so the text needs no lock.
        try:
            update = choice.push(output)
        except Exception as error:
            log.exception("request %s: its output cannot be read", request_id)
            update = Update(choice.index, finish_reason="error", error=repr(error))
        if update.finish_reason is not None:
            with self._lock:
                if opened.choices.pop(choice.index, None) is None:
                    return
                self._router.release(output.request_id)
                if output.finish_reason is None:  # the rank knows nothing of it, as at stop strings
                    self._tell(choice.group, Abort(output.request_id))
                if not opened.choices:
                    self._open.pop(request_id, None)
        self._notify(opened, update)

    def _notify(self, opened: Opened, update: Update) -> None:
        """A listener that raises must not end the thread that reads for all requests of a rank."""
        try:
            opened.on_update(update)
        except BaseException:  # sys.exit too
            log.exception("request %s: its listener failed; the request is dropped", opened.id)
            with self._lock:
                self._drop(opened)

    def end_all(self, update: Update) -> None:
        """Every choice of every request gets `update`; after the engine has failed or closed."""
        with self._lock:
            # Emptied here, so that no reader thread ends one of them a second time.
            ended = [(opened, list(opened.choices)) for opened in self._open.values()]
            for opened, choices in ended:
                for index in choices:
                    self._router.release(opened.name(index))
                opened.choices.clear()
            self._open.clear()
        for opened, choices in ended:
            for index in choices:
                self._notify(opened, replace(update, index=index))
