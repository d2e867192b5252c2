"""A rank process: `python -m crossdock.launch.worker FD PARENT`. Builds its engine, then steps it.

PARENT is the process id of the gateway: a rank ends when it has another parent.
"""

import gc
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import astuple, replace

import numpy as np
import torch

from crossdock.comm import Board, build_world
from crossdock.core import CrossdockError, RankLost, UserError
from crossdock.core.messages import (
    Abort,
    Add,
    Failure,
    Outputs,
    Progress,
    Ready,
    Rebalance,
    Rebalanced,
    Report,
    Snapshot,
    Start,
    Stop,
    Trace,
    Traced,
    Wake,
)
from crossdock.engine import Engine, build_engine
from crossdock.launch.channel import Channel

_HEARTBEAT_S = 0.5
_PROGRESS_S = 0.2


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the gateway's to handle
    channel = Channel(int(sys.argv[1]))
    start = channel.recv()
    parent = int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent, start.rendezvous), daemon=True).start()
    try:
        _run(start, channel)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 1  # the gateway is gone, and nobody is left to tell
    except Exception as error:
        _report_failure(start.rank, channel, error)
        code = 1
    else:
        code = 0
    if os.getppid() != parent:
        _clear_up(start.rendezvous)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # communication libraries must not wait for peers that are gone


def _run(start: Start, channel: Channel) -> None:
    config = start.config
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    world = build_world(
        start.rank,
        config.ranks,
        config.device,
        config.transport,
        start.fds,
        start.rendezvous,
        config.deadline_s,
        config.tp,
    )
    threading.Thread(target=_beat, args=(world.board,), daemon=True).start()
    engine = build_engine(config, world, _progress(start.rank, channel))
    # What exists now stays. Left to the collector, it would be walked through again and again, for
    # some 80 ms each time, in the middle of a step.
    gc.collect()
    gc.freeze()
    world.board.enter("idle")
    channel.send(Ready(start.rank, {**engine.info, "rss_bytes": _resident_bytes()}))
    _serve(engine, start.rank, channel)
    engine.close()


def _serve(engine: Engine, rank: int, channel: Channel) -> None:
    """Steps until told to stop. Asleep, it waits in the channel and uses no CPU."""
    asleep = True
    while True:
        while channel.poll(None if asleep else 0.0):
            match channel.recv():
                case Add(request):
                    engine.add(request)
                case Wake(wave):
                    engine.wake(wave)
                    asleep = False
                case Rebalance(epoch, slot_expert_LP, wave):
                    _rebalance(engine, rank, channel, epoch, slot_expert_LP, wave)
                    asleep = False
                case Abort(request_id):
                    engine.abort(request_id)
                case Report(number):
                    values = {**engine.recorder.snapshot(), **_memory(engine.world.device)}
                    channel.send(Snapshot(rank, values, number))
                case Trace(id, steps):
                    engine.timer.trace(id, steps)
                    _send_traced(engine, rank, channel)
                case Stop():
                    return
        step = engine.step()
        if step.outputs:
            channel.send(Outputs(rank, tuple(step.outputs)))
        while engine.rebalanced:
            ended = engine.rebalanced.pop(0)
            channel.send(Rebalanced(rank, *astuple(ended)))
        _send_traced(engine, rank, channel)
        asleep = step.sleep
        if asleep:
            engine.world.board.enter("idle")


def _rebalance(
    engine: Engine,
    rank: int,
    channel: Channel,
    epoch: int,
    slot_expert_LP: tuple[tuple[int, ...], ...],
    wave: int,
) -> None:
    """What one rank refuses all refuse, since they decide alike."""
    try:
        engine.rebalance(epoch, np.array(slot_expert_LP), wave)
    except UserError as error:
        channel.send(Rebalanced(rank, epoch, 0, 0, 0.0, str(error)))


def _send_traced(engine: Engine, rank: int, channel: Channel) -> None:
    for trace in engine.timer.traced():
        channel.send(Traced(rank, trace.id, trace.intervals, trace.steps))


def _beat(board: Board) -> None:
    """Tells the others that this process runs."""
    while True:
        board.beat()
        time.sleep(_HEARTBEAT_S)


def _end_with(parent: int, rendezvous: str) -> None:
    """Ends this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(_HEARTBEAT_S)
    _clear_up(rendezvous)
    os._exit(1)


def _clear_up(rendezvous: str) -> None:
    """What the parent no longer can."""
    if rendezvous:
        shutil.rmtree(os.path.dirname(rendezvous), ignore_errors=True)


def _progress(rank: int, channel: Channel) -> Callable[[int, int], None]:
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > _PROGRESS_S or done >= total:
            last = now
            channel.send(Progress(rank, "weights", done, total))

    return report


def _report_failure(rank: int, channel: Channel, error: Exception) -> None:
    failure = Failure(
        rank,
        str(error) or type(error).__name__,
        lost=error.rank if isinstance(error, RankLost) else None,
        user_error=isinstance(error, UserError),
        trace="" if isinstance(error, CrossdockError) else traceback.format_exc(),
    )
    if isinstance(error, torch.OutOfMemoryError):
        failure = replace(
            failure,
            user_error=True,
            message=f"rank {rank} ran out of device memory; lower gpu_memory_utilization, "
            f"max_num_batched_tokens or max_model_len, or use more ranks ({error})",
        )
    try:
        channel.send(failure)
    except OSError:
        print(failure.message, file=sys.stderr)


def _memory(device: torch.device) -> dict[str, int]:
    """Of this process: resident, and what it holds of a GPU."""
    held = {"rss_bytes": _resident_bytes()}
    if device.type == "cuda":
        held["device_bytes"] = torch.cuda.memory_reserved(device)
    return held


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
