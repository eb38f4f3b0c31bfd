"""Examples of the description that OpenAPI publishes: one of every model, parameter and plain text."""

from __future__ import annotations

from typing import Any

_TASKS = {
    "dispatched": 214,
    "pending": 0,
    "leased": 6,
    "ready": 3,
    "in_step": 4,
    "trained": 192,
    "dropped": {"uninformative": 8, "stale": 1},
}
_METRICS = {"reward_mean": 0.62, "loss": -0.013, "tokens_per_s": 5120.0, "step_s": 2.4}
_ROW = {"step": 48, "version": 48, "t": 1763711975.1, "reward_mean": 0.62, "loss": -0.013}
_WORKER = {
    "worker_id": "rollout-0",
    "role": "rollout",
    "host": "gpu-7",
    "pid": 4711,
    "incarnation": "7211934409121",
    "state": "running",
    "mesh_epoch": 0,
    "version": 48,
    "heartbeat_age_s": 0.21,
    "activity": "generating",
    "held_leases": 3,
    "gauges": {"tokens_per_s": 1840.0, "memory_bytes": 2147483648.0},
}
_CONTROLLER = {
    "controller_id": "controller-0",
    "address": "127.0.0.1:7000",
    "state": "leader",
    "rest": "http://127.0.0.1:8000",
    "pid": 4700,
    "host": "gpu-7",
    "heartbeat_age_s": 0.1,
}
_SINK = {"name": "tensorboard", "written": 1344, "failing": False, "trouble": ""}
_EVENT = {
    "id": "1763711975123-0/1",
    "t": 1763711975.1,
    "type": "WorkerDied",
    "step": 48,
    "severity": "fault",
    "text": "policy-1 died: exit status 1",
    "mesh_s": 0.8,
    "commit_s": 3.1,
    "noticed": "its launcher saw the process end",
    "fields": {"worker_id": "policy-1", "how": "exit", "detail": "exit status 1"},
}
_DROPPED = {
    "task_id": "t17",
    "attempt": 3,
    "reason": "failed",
    "t": 1763711975.1,
    "detail": "reward: ValueError",
}
_FAILING = {"task_id": "t18", "attempt": 2, "failures": ["reward: ValueError"]}
_GROUP = {
    "group_id": "t17",
    "attempt": 1,
    "stand": "trained",
    "owner": "rollout-0",
    "step": 5,
    "sequences": 8,
    "tokens": 912,
    "reward_mean": 0.62,
    "reward_std": 0.3,
    "reward_max": 1.0,
    "min_version": 3,
    "max_version": 4,
    "staleness": 1,
}
_COMPLETION = {
    "text": "42",
    "tokens": [220, 2983],
    "logprobs": [-0.11, -0.52],
    "versions": [[4, 2]],
    "finish_reason": "stop",
    "reward": 1.0,
    "reward_components": {"exact_match": 1.0},
    "advantage": 1.27,
}
_VERSION = {"version": 48, "step": 48, "workers": ["policy-0", "rollout-0"]}

MODELS: dict[str, Any] = {
    "Problem": {
        "type": "about:blank",
        "title": "Not found",
        "status": 404,
        "detail": "there is no worker 'rollout-9'",
        "instance": "/api/v1/workers/rollout-9",
    },
    "Tasks": _TASKS,
    "Row": _ROW,
    "Steps": {"steps": [_ROW], "next": 48},
    "Worker": _WORKER,
    "ControllerInfo": _CONTROLLER,
    "SinkState": _SINK,
    "Run": {
        "run_id": "demo",
        "run_name": "demo",
        "phase": "running",
        "reason": "",
        "leader": "controller-0",
        "term": 1,
        "step": 48,
        "total_steps": 200,
        "version": 48,
        "max_staleness": 2,
        "mesh_epoch": 1,
        "checkpoint_step": 40,
        "tasks": _TASKS,
        "started_t": 1763711800.0,
        "ended_t": 0.0,
        "desired": {"policy": 2, "rollout": 4},
        "metrics": _METRICS,
        "failovers": 0,
        "mesh_rebuilds": 0,
        "rollbacks": 0,
        "controllers": [_CONTROLLER],
        "served_by": "controller-0",
        "time_left_s": 364.8,
        "stalled_s": 0.0,
        "bottleneck": "Trainers and rollout workers keep pace.",
        "proposed": {},
        "proposed_why": "",
        "provider_trouble": "",
        "sinks": [_SINK],
        "samples_trained": 1536,
        "tokens_trained": 589824,
    },
    "Series": {
        "x": [47, 48],
        "t": [1763711972.7, 1763711975.1],
        "low": {},
        "high": {},
        "series": {"reward_mean": [0.6, 0.62], "loss": [None, -0.013]},
        "evals": [{"step": 40, "version": 40, "t": 1763711955.0, "eval_reward_mean": 0.58}],
        "names": ["loss", "reward_mean"],
    },
    "Event": _EVENT,
    "Events": {"events": [_EVENT], "next": _EVENT["id"]},
    "DroppedTask": _DROPPED,
    "FailingTask": _FAILING,
    "TaskDetail": {"counts": _TASKS, "quarantined": [_DROPPED], "failing": [_FAILING]},
    "GroupSummary": _GROUP,
    "CompletionDetail": _COMPLETION,
    "Groups": {"groups": [_GROUP], "total": 192},
    "GroupDetail": {
        **_GROUP,
        "prompt": "What is 6 times 7?",
        "completions": [_COMPLETION],
        "generate_s": 1.8,
        "reward_s": 0.02,
    },
    "Flow": {
        "bottleneck": "Trainers and rollout workers keep pace.",
        "stalled_s": 0.0,
        "tasks": _TASKS,
        "staleness": {"0": 4, "1": 3},
        "max_staleness": 2,
        "groups_per_step": 4,
        "group_size": 8,
        "tokens_per_s": 5120.0,
        "samples_per_s": 13.3,
        "time_split_s": {"wait": 0.2, "compute": 1.9},
        "step_s": 2.4,
        "workers": {"policy": 2, "rollout": 4},
    },
    "VersionEpoch": _VERSION,
    "Checkpoint": {
        "step": 40,
        "version": 40,
        "path": "checkpoints/step-40",
        "size_bytes": 1310720,
        "t": 1763711955.0,
    },
    "Done": {"accepted": True, "message": "desired counts are now policy=2, rollout=4"},
    "Counts": {"rollout": 2},
    "ScaleBody": {"rollout": 4, "expected": {"rollout": 2}, "request_id": "grow-1"},
    "RequestBody": {"request_id": "ask-1"},
    "DrainBody": {"replace": True, "incarnation": "7211934409121", "request_id": "drain-1"},
    "StopBody": {"reason": "good enough", "request_id": "stop-1"},
}
PARAMETERS: dict[str, Any] = {
    "worker_id": "rollout-0",
    "group_id": "t17",
    "limit": 50,
    "names": "reward_mean,loss",
    "until": 200,
    "points": 360,
    "sort": "-reward",
    "stand": "trained",
    "reason": "stale",
    "step": 5,
    "min_reward": 0.5,
    "max_reward": 1.0,
    "min_tokens": 10,
    "max_tokens": 2000,
    "kind": "faults",
    "newest": True,
    "since_step": 10,
    "until_step": 20,
    "last-event-id": _EVENT["id"],
}
SINCE = {"integer": 40, "string": _EVENT["id"]}
"""A step, or an event."""
PLAIN: dict[str, Any] = {
    "/healthz": {"status": "alive"},
    "/readyz": {"status": "leader"},
    "/metrics": "# TYPE paceline_step gauge\npaceline_step 48.0\n",
    "/api/v1/config": {"train": {"steps": 200, "groups_per_step": 4}},
    "/api/v1/events/stream": 'id: 1763711975123-0/1\nevent: fault\ndata: {"type":"WorkerDied"}\n\n',
}
"""Answers that have no model, by path."""


def add_examples(schema: dict[str, Any]) -> None:
    """Into an OpenAPI ``schema``, in place."""
    for name, model in schema["components"]["schemas"].items():
        if name in MODELS:
            model["examples"] = [MODELS[name]]
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                name, kind = parameter["name"], parameter["schema"].get("type", "")
                found = SINCE.get(kind) if name == "since" else PARAMETERS.get(name)
                if found is not None:
                    parameter["example"] = found
            if path in PLAIN:
                for media in operation["responses"]["200"]["content"].values():
                    media["example"] = PLAIN[path]
