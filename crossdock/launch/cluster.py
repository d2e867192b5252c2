"""The rank processes of one engine: starting them, talking to them, ending them."""

import contextlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

from crossdock.core import CrossdockError, EngineConfig
from crossdock.core.messages import Start, encode
from crossdock.launch.channel import Channel, channel_pair

_STDERR_LINES = 20
_GRACE_S = 1.5


class Cluster:
    """R processes of this host, each with a reader and a writer thread in this one.

    `config` has everything resolved; `fds` are inherited by every rank, by name.

    `on_message(rank, message)` is called from the reader threads; `on_exit(rank, why)` once per
    process that ends before `close`, with its last lines of standard error.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[int, Any], None],
        on_exit: Callable[[int, str], None],
        fds: dict[str, int],
    ):
        self.config, self._fds = config, fds
        self._on_message, self._on_exit = on_message, on_exit
        # Only process groups and GPUs' symmetric memory meet in files; mkdtemp's mode is 0700.
        in_files = config.transport in ("collective", "nvlink") or config.tp > 1
        self._rendezvous = tempfile.mkdtemp(prefix="crossdock-") if in_files else ""
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._outboxes: list[queue.SimpleQueue[bytes | None]] = []
        self._channels: list[Channel] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stderr: list[deque[str]] = []
        self._stderr_threads: list[threading.Thread] = []

    def start(self) -> None:
        """Apart from the constructor: threads may call `on_exit`, which closes this, at once."""
        store = os.path.join(self._rendezvous, "store") if self._rendezvous else ""
        try:
            for rank in range(self.config.ranks):
                self._spawn(rank)
                self.send([rank], Start(rank, self.config, self._fds, store))
        except BaseException:
            self.close()
            raise

    def _spawn(self, rank: int) -> None:
        ours, theirs = channel_pair()
        threads = str(self.config.threads)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "crossdock.launch.worker", str(theirs), str(os.getpid())],
            pass_fds=(theirs, *self._fds.values()),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_fileno() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        os.close(theirs)
        self._processes.append(process)
        self._channels.append(ours)
        self._outboxes.append(queue.SimpleQueue())
        self._stderr.append(deque(maxlen=_STDERR_LINES))
        threads_of = [
            threading.Thread(target=target, args=(rank,), daemon=True)
            for target in (self._forward_stderr, self._read, self._write)
        ]
        self._stderr_threads.append(threads_of[0])
        for thread in threads_of:
            thread.start()

    def send(self, ranks: Iterable[int], message: Any) -> None:
        """Never blocks: a rank that does not read must not stop the gateway. Encoded here, so that
        whoever asks for what cannot travel is told, and nobody else."""
        data, outboxes = encode(message), [self._outboxes[rank] for rank in ranks]
        # No Python runs between them, so neither does a signal's handler: after a Ctrl-C all ranks
        # have it, or none. A group of which some have a request would fail.
        deque(map(queue.SimpleQueue.put, outboxes, repeat(data)), maxlen=0)

    def broadcast(self, message: Any) -> None:
        self.send(range(len(self._processes)), message)

    def last_error(self, rank: int) -> str:
        return "\n".join(self._stderr[rank])

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _write(self, rank: int) -> None:
        while True:
            data = self._outboxes[rank].get()
            if data is None:
                return
            try:
                self._channels[rank].send_bytes(data)
            except OSError:
                return  # the reader tells why

    def _read(self, rank: int) -> None:
        channel = self._channels[rank]
        try:
            while True:
                self._on_message(rank, channel.recv())
        except (EOFError, OSError, CrossdockError) as error:
            if self.closing.is_set():
                return
            # A channel may close a moment before its process can be reaped.
            try:
                code = self._processes[rank].wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                self._on_exit(rank, f"rank {rank} closed its channel ({error})")
                return
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            self._stderr_threads[rank].join(timeout=1.0)  # its last words may still be in the pipe
            said = self.last_error(rank)
            self._on_exit(rank, f"rank {rank} ended ({how})" + (f":\n{said}" if said else ""))
        except Exception as error:  # else this rank's requests would wait for ever
            self._on_exit(rank, f"a message of rank {rank} cannot be handled: {error!r}")

    def _forward_stderr(self, rank: int) -> None:
        pipe = self._processes[rank].stderr
        assert pipe is not None
        for raw in pipe:
            line = raw.decode(errors="replace").rstrip()
            self._stderr[rank].append(line)
            if not self.closing.is_set():
                # Whoever read ours may be gone; a rank whose pipe is full would stop.
                with contextlib.suppress(OSError, ValueError):
                    print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)

    def close(self, stop: Any = None) -> None:
        """Ends every process: asks with `stop`, then kills. Returns once all are gone; safe to call
        again and from other threads."""
        with self._lock:
            if not self.closing.is_set():
                self.closing.set()
                self._end(stop)

    def _end(self, stop: Any) -> None:
        for rank in range(len(self._processes)):
            if stop is not None:
                self.send([rank], stop)
            self._outboxes[rank].put(None)
        deadline = time.monotonic() + (_GRACE_S if stop is not None else 0.0)
        try:
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.0, deadline - time.monotonic()))
        finally:  # also where Ctrl-C ends the wait
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.wait()
            if self._rendezvous:
                shutil.rmtree(self._rendezvous, ignore_errors=True)


def _has_fileno() -> bool:
    try:
        sys.stderr.fileno()
    except (OSError, AttributeError, ValueError):
        return False  # a notebook's or a test's replacement
    return True
