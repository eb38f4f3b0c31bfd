"""Severity and text of the journal's events, as run files and event streams carry them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

COUNTED = frozenset(
    {
        *("TasksLeased", "GroupAccepted", "TaskReleased", "EvalTaskDone"),
        *("StepOpened", "VoteCast", "LinkAssigned", "LeaseSuperseded"),
    }
)
"""Events that happen many times a step: they are counted and not listed."""
ROUTINE_DROPS = frozenset({"uninformative", "stale", "run_ended"})
"""Reasons for dropped tasks that belong to normal operation. Other drops are listed."""
FAULTS = frozenset({"WorkerDied", "MeshBroken", "RolledBack", "StepAborted", "TaskDropped"})


def described(event: Mapping[str, Any]) -> dict[str, Any]:
    """``event`` as a record: a listed event gets ``severity`` (info, warning, error) and ``text``."""
    if not _is_listed(event):
        return dict(event)
    return {**event, "severity": _severity(event), "text": _text(event)}


def _is_listed(event: Mapping[str, Any]) -> bool:
    kind = event.get("type")
    if kind in COUNTED:
        return False
    if kind == "StepResharded":
        return int(event.get("round", 0)) > 1
    if kind == "WorkerChanged":
        return event.get("lifecycle") not in ("starting", "running")
    return not (kind == "TaskDropped" and event.get("reason") in ROUTINE_DROPS)


def _severity(event: Mapping[str, Any]) -> str:
    kind = event.get("type")
    if kind == "RunFailed":
        return "error"
    planned = event.get("reason") == "membership" or event.get("how") == "replaced"
    fault = kind in FAULTS or (kind == "TermBegun" and int(event.get("term", 1)) > 1)
    return "warning" if fault and not planned else "info"


def _text(event: Mapping[str, Any]) -> str:
    kind = str(event.get("type", "?"))
    try:
        return _TEXTS[kind](event)
    except (KeyError, TypeError, ValueError):
        return kind


def _detail(event: Mapping[str, Any], field: str = "detail") -> str:
    text = str(event.get(field) or "")
    return f": {text}" if text else ""


def _reason(event: Mapping[str, Any], field: str = "reason") -> str:
    return str(event[field]).replace("_", " ")


def _names(members: Any) -> str:
    return ", ".join(str(m["worker_id"]) for m in members)


def _counts(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={count}" for name, count in counts.items())


def _reward(value: float | None) -> str:
    return "" if value is None else f", reward {value:.3f}"


_TEXTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
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
    "StepResharded": lambda e: f"step {e['step']} resharded (round {e['round']})",
    "StepCommitted": lambda e: (
        f"step {e['step']} committed{_reward(e['metrics'].get('reward_mean'))}"
    ),
    "StepAborted": lambda e: f"step {e['step']} aborted{_detail(e, 'reason')}",
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
    "Scaled": lambda e: f"desired: {_counts(e['desired'])}",
    "BoundsSet": lambda e: f"bounds: {_counts(e['bounds']) or 'none'}",
    "Drained": lambda e: (
        f"{e['worker_id']} is asked to leave"
        + (f"; desired: {_counts(e['desired'])}" if e.get("desired") else "")
    ),
    "Paused": lambda e: "paused" if e["paused"] else "resumed",
    "CheckpointRequested": lambda e: f"checkpoint requested after step {e['step']}",
    "StopRequested": lambda e: f"stop requested{_detail(e, 'reason')}",
    "RunFinished": lambda e: f"run finished ({e['reason']})",
    "RunFailed": lambda e: f"run failed{_detail(e, 'reason')}",
}
