"""OpenAPI description: security, problem details and an example of everything."""

from typing import Any

from controller.rest.auth import OPEN_PATHS
from controller.rest.schemas import ProblemModel

EVENT_ID = "1763711975123-0/1"
EXAMPLES: dict[str, Any] = {
    "accepted": True,
    "bottleneck": "Trainers and rollout workers keep pace.",
    "controller_id": "controller-0",
    "desired": {"policy": 2, "rollout": 4},
    "dropped": {"uninformative": 8, "stale": 1},
    "changed": {"train.optimizer.lr": {"old": 1e-6, "new": 5e-7, "step": 41}},
    "changes": {"train.optimizer.lr": {"old": 1e-6, "new": 5e-7, "step": 41}},
    "evals": [{"step": 40, "version": 40, "t": 1763711955.0, "eval_reward_mean": 0.58}],
    "fields": {"worker_id": "policy-1", "how": "exit"},
    "grep": "I cannot",
    "group_id": "t17",
    "host": "gpu-7",
    "id": EVENT_ID,
    "incarnation": "7211934409121",
    "last-event-id": EVENT_ID,
    "leader": "controller-0",
    "metrics": {"reward_mean": 0.62, "loss": -0.013},
    "new": 5e-7,
    "old": 1e-6,
    "settings": {"train.optimizer.lr": 5e-7},
    "names": ["loss", "reward_mean"],
    "next": EVENT_ID,
    "owner": "rollout-0",
    "path": "checkpoints/step-40",
    "phase": "running",
    "role": "rollout",
    "run_id": "demo",
    "run_name": "demo",
    "series": {"reward_mean": [0.62]},
    "severity": "warning",
    "response_tokens": {"all": 212.5, "late": 640.0},
    "staleness": {"0": 4, "1": 3},
    "state": "trained",
    "step": 48,
    "t": 1763711975.1,
    "task_id": "t17",
    "text": "policy-1 died (exit: exit status 1)",
    "time_split_s": {"wait": 0.2, "compute": 1.9},
    "token_ages": {"0": 0.25, "1": 0.5, "2": 0.2, "3-4": 0.05},
    "type": "WorkerDied",
    "until": 200,
    "until_step": 20,
    "version": 48,
    "versions": [[4, 2]],
    "worker_id": "rollout-0",
    "workers": {"policy": 2, "rollout": 4},
}  # Examples of fields and parameters by name, if their type fits. Others follow from the type.
TEXTS: dict[str, Any] = {
    "/healthz": {"status": "alive"},
    "/readyz": {"status": "leader"},
    "/metrics": "# TYPE paceline_step gauge\npaceline_step 48.0\n",
    "/api/v1/config": {"train": {"steps": 200, "groups_per_step": 4}},
    "/api/v1/events/stream": f'id: {EVENT_ID}\nevent: warning\ndata: {{"type":"WorkerDied"}}\n\n',
}  # Replies without a model, by path
TYPES: dict[str, tuple[type, Any]] = {
    "integer": (int, 1),
    "number": (float, 0.5),
    "boolean": (bool, False),
    "string": (str, ""),
    "object": (dict, {}),
    "array": (list, []),
}  # Python type and default example of each JSON type


def complete(schema: dict[str, Any]) -> dict[str, Any]:
    parts = schema.setdefault("components", {})
    named = parts.setdefault("schemas", {})
    named["Problem"] = ProblemModel.model_json_schema()
    for unused in ("HTTPValidationError", "ValidationError"):
        named.pop(unused, None)
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            # Reads need the token only if the interface is bound to more than loopback.
            reads: list[dict[str, list[str]]] = [] if path in OPEN_PATHS else [{}, {"token": []}]
            operation["security"] = reads if method == "get" else [{"token": []}]
            for parameter in operation.get("parameters", ()):
                parameter["example"] = _example(parameter["schema"], named, parameter["name"])
            if path in TEXTS:
                for media in operation["responses"]["200"]["content"].values():
                    media["example"] = TEXTS[path]
    for model in named.values():
        model["examples"] = [_example(model, named)]
    return schema


def _example(schema: dict[str, Any], named: dict[str, Any], name: str = "") -> Any:
    """A value of ``schema``; ``name``: of its field or parameter."""
    if "properties" in schema:
        return {k: _example(v, named, k) for k, v in schema["properties"].items()}
    if "$ref" in schema:
        return _example(named[schema["$ref"].rpartition("/")[2]], named, name)
    if "enum" in schema:
        return EXAMPLES[name] if EXAMPLES.get(name) in schema["enum"] else schema["enum"][0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0], named, name)
    if name == "since":  # a step, or an event
        return 40 if schema["type"] == "integer" else EVENT_ID
    if "type" not in schema:  # any JSON value: that of a setting
        return EXAMPLES[name]
    kind, default = TYPES[schema["type"]]
    if isinstance(EXAMPLES.get(name), kind):
        return EXAMPLES[name]
    if "items" in schema:
        return [_example(schema["items"], named)]
    return schema.get("default", default)
