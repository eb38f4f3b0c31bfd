"""Run events as one line of prose each, for a console or ``paceline events``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def tell(event: Mapping[str, Any]) -> str:
    """One line for a journalled event (an object with ``type`` and the event's own fields)."""
    if text := event.get("text"):
        return str(text)
    kind = str(event.get("type", "?"))
    told = _TOLD.get(kind)
    if told is None:
        shown = {k: v for k, v in event.items() if k not in ("type", "position", "n", "t", "after")}
        return " ".join([kind, *(f"{k}={v}" for k, v in shown.items())])
    try:
        return told(event)
    except (KeyError, TypeError, ValueError):
        return kind


def _detail(event: Mapping[str, Any], field: str = "detail") -> str:
    text = str(event.get(field) or "")
    return f": {text}" if text else ""


def _reason(event: Mapping[str, Any], field: str = "reason") -> str:
    """peer_error is how programs say it."""
    return str(event[field]).replace("_", " ")


def _names(members: Any) -> str:
    return ", ".join(str(m["worker_id"]) for m in members)


_TOLD: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "RunStarted": lambda e: "run started",
    "TermBegun": lambda e: f"{e['controller_id']} leads (term {e['term']})",
    "WorkerRegistered": lambda e: f"{e['worker_id']} joined (pid {e['pid']} on {e['host']})",
    "WorkerDied": lambda e: f"{e['worker_id']} died ({_reason(e, 'how')}{_detail(e)})",
    "WorkerChanged": lambda e: f"{e['worker_id']} is {e['lifecycle']}",
    "SpareSet": lambda e: (
        f"{e['worker_id']} stands by" if e["spare"] else f"{e['worker_id']} works again"
    ),
    "TaskDropped": lambda e: f"task {e['task_id']} dropped ({_reason(e)}{_detail(e)})",
    "MeshBroken": lambda e: f"mesh epoch {e['epoch']} is over ({_reason(e)}{_detail(e)})",
    "MeshFormed": lambda e: f"mesh epoch {e['epoch']}: {_names(e['members'])}",
    "RolledBack": lambda e: (
        f"back from step {e['from_step']} to step {e['step']}: no replica holds the newest state"
    ),
    "StepResharded": lambda e: f"step {e['step']} resharded over mesh epoch {e['mesh_epoch']}",
    "StepCommitted": lambda e: (
        f"step {e['step']} committed, reward {e['metrics'].get('reward_mean', float('nan')):.3f}"
    ),
    "StepAborted": lambda e: f"step {e['step']} given up{_detail(e, 'reason')}",
    "CheckpointRecorded": lambda e: f"checkpoint of step {e['step']}: {e['path']}",
    "EvalScheduled": lambda e: f"evaluation after step {e['step']} over {e['rows']} prompts",
    "EvalRecorded": lambda e: (
        f"evaluation after step {e['step']}: "
        + (
            "no prompt could be scored"
            if e["reward_mean"] is None
            else f"reward {e['reward_mean']:.3f} over {e['count']} prompts"
        )
    ),
    "Scaled": lambda e: "wanted: " + ", ".join(f"{k}={v}" for k, v in e["desired"].items()),
    "BoundsSet": lambda e: (
        "bounds: " + (", ".join(f"{k}={v}" for k, v in e["bounds"].items()) or "none")
    ),
    "Drained": lambda e: (
        f"{e['worker_id']} is asked to leave"
        + "".join(f", {k}={v} wanted" for k, v in (e.get("desired") or {}).items())
    ),
    "Paused": lambda e: "paused" if e["paused"] else "resumed",
    "CheckpointRequested": lambda e: f"a checkpoint after step {e['step']} is asked for",
    "StopRequested": lambda e: f"stop requested{_detail(e, 'reason')}",
    "RunFinished": lambda e: f"run finished ({e['reason']})",
    "RunFailed": lambda e: f"run failed{_detail(e, 'reason')}",
}
