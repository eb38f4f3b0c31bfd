"""GPUs of this machine: those that are visible, and those that each worker of a run gets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from paceline.config.schema import Config
from paceline.worker_pools import pool_of_worker
from paceline_launcher.node_placement import gpus_needed, gpus_of_worker

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")


def gpus_for(device: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """GPUs that workers with ``model.device`` compute on."""
    return () if device == "cpu" else visible_gpus(environ)


def visible_gpus(environ: Mapping[str, str], devices: Path = _DEVICES) -> tuple[str, ...]:
    """Names of the GPUs, as CUDA_VISIBLE_DEVICES takes them; empty if there is none. ``devices``:
    directory of the device files. A container has those of its own GPUs alone."""
    if VARIABLE in environ:
        named = [part.strip() for part in environ[VARIABLE].split(",")]
        # CUDA ignores what comes after a number that is no device.
        valid = named[: next((at for at, one in enumerate(named) if one in ("", "-1")), len(named))]
        return tuple(valid)
    found = [path.name for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    # CUDA counts the devices that it sees from 0, whatever their files are called.
    return tuple(str(number) for number in range(len(found)))


class MachineGpus:
    """``names``: as CUDA_VISIBLE_DEVICES takes them."""

    def __init__(self, config: Config, names: Sequence[str]) -> None:
        self._config = config
        self._names = names
        self.shared = gpus_needed(config) > len(names)
        """True if [fleet] needs more GPUs than there are: workers are then dealt round."""
        self._held: dict[str, tuple[str, ...]] = {}

    def take(self, worker: str, running: Collection[str]) -> tuple[str, ...] | None:
        """GPUs that it had before, if nobody has them, or else the first free ones; None if too few
        are free. If GPUs are shared: those that it had before, or else those with the fewest
        workers. ``running``: names of the workers that run or are about to. What others had is
        free."""
        others = (self._held.get(name, ()) for name in running if name != worker)
        taken = {gpu for gpus in others for gpu in gpus}
        if worker not in self._held or (not self.shared and taken.intersection(self._held[worker])):
            need = gpus_of_worker(self._config, pool_of_worker(worker))
            free = [name for name in self._names if name not in taken]
            if self.shared:
                load = Counter(gpu for n in running if n != worker for gpu in self._held.get(n, ()))
                free = sorted(self._names, key=lambda name: load[name])
            elif need > len(free):
                return None
            self._held[worker] = tuple(free[:need])
        return self._held[worker]

    def keep(self, worker: str, environ: Mapping[str, str]) -> None:
        """``environ``: of a worker that runs already."""
        named = tuple(environ.get(VARIABLE, "").split(","))
        if set(named) <= set(self._names):
            self._held[worker] = named


def machine_gpus(config: Config, environ: Mapping[str, str]) -> MachineGpus | None:
    """GPUs of this machine; None if workers compute on none."""
    names = gpus_for(config.model.device, environ)
    return MachineGpus(config, names) if names else None


def shown(gpus: Sequence[str]) -> dict[str, str]:
    """Variables that show a process these GPUs and no others."""
    return {VARIABLE: ",".join(gpus)} if gpus else {}
