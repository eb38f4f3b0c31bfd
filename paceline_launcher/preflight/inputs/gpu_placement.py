"""Check of GPU placement: whether each worker of a fleet on this machine has GPUs of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline.config.schema import Config
from paceline.worker_pools import desired_workers, worker_name
from paceline_launcher.machine_gpus import gpus_for, machine_gpus
from paceline_launcher.node_placement import gpus_needed
from paceline_launcher.preflight.check import Check, ok, warn

NAME = "GPU placement"


def gpu_placement(config: Config, environ: Mapping[str, str]) -> Iterator[Check]:
    """Nothing if workers compute on CPUs, or are started elsewhere."""
    seen = gpus_for(config.model.device, environ)
    if not seen or config.fleet.provider != "local":
        return
    gpus = machine_gpus(config, environ)
    if gpus is None:
        yield warn(
            NAME,
            f"the workers of [fleet] need {gpus_needed(config)} GPUs, and this machine has {len(seen)}: all of them share what "
            "there is",
            "Their memory must fit together: take fewer workers, lower vLLM's share (gpu_memory_utilization in [rollout.vllm]), or "
            "start the run on several machines with `paceline node`",
        )
        return
    counts = desired_workers(config)
    names = [worker_name(pool, index) for pool in counts for index in range(counts[pool])]
    given = {name: gpus.take(name, names) or () for name in names}
    places = "; ".join(f"{name} {','.join(own)}" for name, own in given.items() if own)
    yield ok(NAME, f"GPUs by worker: {places}")
