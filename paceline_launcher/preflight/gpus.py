"""Checks of the GPUs of this machine: whether the fleet's workers fit them."""

import os
from collections.abc import Mapping
from pathlib import Path

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.memory_plan import Gpu
from paceline.worker_pools import desired_workers, worker_name
from paceline_launcher.machine_gpus import machine_gpus
from paceline_launcher.node_placement import gpus_needed
from paceline_launcher.preflight.findings import Findings, Start, fail, ok, skip, warn

DRIVER = Path("/proc/driver/nvidia")


def gpu_memory(config: Config, gpu: Gpu | None = None) -> Findings:
    """Checks whether a policy rank and an engine fit. ``gpu``: default, the smallest of this
    machine."""
    local = Path(config.model.path).expanduser()
    if config.model.device == "cpu" or not (local / "config.json").is_file():
        return
    # Without a driver there is no GPU, and torch, which takes seconds to import, is not asked.
    if gpu is None and DRIVER.exists():
        from paceline.memory_plan import found_gpu

        gpu = found_gpu()
    if gpu is None:
        return
    from paceline.memory_plan import memory_plan, problems, trainer_dtype
    from paceline.model_shape import read_shape

    try:
        shape = read_shape(
            str(local), trainer_dtype(config), trust_remote_code=config.model.trust_remote_code
        )
    except BadInput as error:
        yield skip(str(error))
        return
    wrong = list(problems(memory_plan(config, shape), gpu))
    yield from (fail(found, remedy) for found, remedy in wrong)
    if not wrong:
        yield ok(f"a policy rank and an engine each fit {gpu.name}")


def gpu_placement(start: Start, environ: Mapping[str, str] = os.environ) -> Findings:
    """Checks whether each worker of a fleet here has GPUs that no other has."""
    config = start.config
    gpus = machine_gpus(config, environ) if start.here and not start.placed else None
    if gpus is None or config.fleet.provider != "local":
        return
    counts = desired_workers(config)
    names = [worker_name(pool, index) for pool in counts for index in range(counts[pool])]
    given = {name: gpus.take(name, names) or () for name in names}
    numbers = "; ".join(f"{name} {','.join(some)}" for name, some in given.items() if some)
    if gpus.shared:
        yield warn(
            f"the workers of [fleet] need {gpus_needed(config)} GPUs, and this machine has fewer. "
            f"GPUs by worker: {numbers}",
            "The memory of workers that share a GPU must fit together: take fewer workers, lower "
            "vLLM's share (gpu_memory_utilization in [rollout.vllm]), or start the run on several "
            "machines with `paceline node`",
        )
        return
    yield ok(f"GPUs by worker: {numbers}")
