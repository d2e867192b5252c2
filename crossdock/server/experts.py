"""Expert loads and placements over HTTP: recording the one, asking for another of the other."""

import asyncio
from typing import Any

from crossdock.server.border import EngineClient, Outcome
from crossdock.server.schema import LoadBody, RebalanceBody


async def record_loads(client: EngineClient, body: LoadBody) -> dict[str, Any]:
    """The document of recorded loads for "dump", else the state of the recording.

    Raises:
        ConfigError: nothing is recorded.
    """
    recording = client.recording
    if body.action == "dump":
        return await asyncio.to_thread(recording.dump)
    act = {"start": recording.start, "stop": recording.stop, "reset": recording.reset}
    await asyncio.to_thread(act[body.action])
    return recording.state()


async def rebalance(client: EngineClient, body: RebalanceBody) -> dict[str, Any]:
    """Answers when it has ended. A client that leaves does not stop it.

    Raises:
        Busy: one is under way.
        ConfigError: rebalancing is off, or there is no load to plan from.
    """
    outcome = await asyncio.to_thread(client.balancer.rebalance, body.policy)
    return _document(outcome)


def _document(outcome: Outcome) -> dict[str, Any]:
    document: dict[str, Any] = {
        "result": outcome.result,
        "why": outcome.why,
        "moved_bytes": outcome.moved_bytes,
        "seconds": outcome.seconds,
    }
    plan = outcome.plan
    if plan is None:
        return document
    return {
        **document,
        "policy": plan.policy,
        "imbalance_before": list(plan.imbalance_before),
        "imbalance_after": list(plan.imbalance_after),
        "predicted_gain": plan.gain,
        "moves": plan.moves,
        "placement": plan.slot_expert_LP.tolist(),
    }
