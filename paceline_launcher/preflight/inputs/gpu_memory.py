"""Check of GPU memory: whether a policy rank and an engine fit the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.memory_plan.gpus import Gpu
from paceline_launcher.preflight.check import Check, fail, ok, skip

NAME = "GPU memory"
DRIVER = Path("/proc/driver/nvidia")


def gpu_memory(config: Config, gpu: Gpu | None = None) -> Iterator[Check]:
    """Nothing where the size of a GPU is not known. ``gpu``: default, the smallest of this machine."""
    local = Path(config.model.path).expanduser()
    if config.model.device == "cpu" or not (local / "config.json").is_file():
        return
    # Without a driver there is no GPU, and torch, which takes seconds to import, is not asked.
    if gpu is None and DRIVER.exists():
        from paceline.memory_plan.gpus import found_gpu

        gpu = found_gpu()
    if gpu is None:
        return
    from paceline.memory_plan.memory_plan import memory_plan, problems
    from paceline.memory_plan.model_shape import read_shape

    try:
        shape = read_shape(
            str(local), config.model.dtype, trust_remote_code=config.model.trust_remote_code
        )
    except BadInput as error:
        yield skip(NAME, str(error))
        return
    wrong = list(problems(memory_plan(config, shape), gpu))
    yield from (fail(NAME, found, remedy) for found, remedy in wrong)
    if not wrong:
        yield ok(NAME, f"a policy rank and an engine each fit {gpu.name}")
