"""Placement: the node of every worker of a run, and the GPUs that it sees there.

Pure. Every node computes the placement from the same numbers, so nobody has to send it.

- The workers that [fleet] names are placed in order: policy replicas, rollout workers, scorers.
- With GPUs a worker gets the first node that has enough free ones, all on that node. On CPUs the
  workers are dealt out: each goes to the node that has the fewest.
- A policy replica of more ranks than a node has GPUs gets the first nodes that are wholly free. Its
  ranks fill one node after the other, and other workers may have what is left of the last.
- With turns (fleet.sharing) rollout worker N is at the place of policy replica N, and has its GPUs.
  Scorers are dealt round to these places: each has the first GPU of one.
- A worker beyond those (`paceline scale`, a drained worker's replacement) has a place that depends
  on its own number alone, so that it never moves: the GPUs that are left, policy replicas from the
  first, others from the last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.worker_pools import (
    POLICY,
    ROLLOUT,
    SCORER,
    desired_workers,
    pair_of,
    pool_of_worker,
    role_of,
    scorer_of,
    share_device,
    worker_name,
)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    node: int
    gpus: tuple[int, ...] = ()
    """Numbers of the worker's GPUs on that node, from 0."""
    rest: tuple[WorkerPlace, ...] = ()
    """Further places of a replica on several nodes; rank 0 is on the first. One GPU is one rank."""

    def part_on(self, node: int) -> WorkerPlace | None:
        return next((part for part in (self, *self.rest) if part.node == node), None)

    def ranks_on(self, node: int) -> range:
        """Ranks of a replica on several nodes; none of another worker."""
        first = 0
        for part in (self, *self.rest) if self.rest else ():
            if part.node == node:
                return range(first, first + len(part.gpus))
            first += len(part.gpus)
        return range(0)


def gpus_of_worker(config: Config, pool: str) -> int:
    """GPUs that a worker of ``pool`` computes on, if there are any."""
    role = role_of(pool)
    if role == POLICY:
        return config.fleet.policy_ranks
    if role == SCORER:
        return 1 if config.scorers.by_name[scorer_of(pool)].url is None else 0
    if config.rollout.source == "recorded":
        return 0
    stages = int(config.rollout.vllm.get("pipeline_parallel_size", 1))
    return config.rollout.tensor_parallel * stages


def workers_with_spares(config: Config) -> dict[str, int]:
    """Workers that are placed, by pool."""
    counts = desired_workers(config)
    counts[ROLLOUT] += config.fleet.rollout_spares
    return counts


def gpus_needed(config: Config) -> int:
    """GPUs of all workers of [fleet], spares included. Those that take turns need them once."""
    counts = workers_with_spares(config)
    pools = [p for p in counts if p == POLICY or pair_of(config, worker_name(p, 0)) is None]
    return sum(counts[pool] * gpus_of_worker(config, pool) for pool in pools)


def unlike_pairs(config: Config) -> str:
    """Sentence about workers that cannot take turns at the same GPUs; empty if they can."""
    replica, engine = gpus_of_worker(config, POLICY), gpus_of_worker(config, ROLLOUT)
    if not config.takes_turns or replica == engine:
        return ""
    return (
        f'fleet.sharing = "{config.fleet.sharing}": a policy replica computes on {replica} '
        f"GPUs and an engine on {engine}, and they take turns at the same ones. "
        "Make fleet.policy_ranks and rollout.tensor_parallel equal"
    )


def nodes_needed(config: Config, gpus: int) -> int:
    """Nodes of ``gpus`` GPUs that have room for the workers of [fleet]. None but a replica may need
    more than one has."""
    nodes = max(1, -(-gpus_needed(config) // gpus)) if gpus else 1
    while True:
        try:
            Placement(config, nodes, gpus)
            return nodes
        except BadInput:
            nodes += 1


class Placement:
    """Places of a run's workers. Raises BadInput if the nodes have no room for those of [fleet].
    ``nodes``: 0 if they start no workers. ``gpus``: of each node; 0: workers compute on CPUs."""

    def __init__(self, config: Config, nodes: int, gpus: int = 0) -> None:
        if gpus and (unlike := unlike_pairs(config)):
            raise BadInput(unlike)
        if config.takes_turns and 0 < gpus < config.fleet.policy_ranks:
            raise BadInput(
                f'fleet.sharing = "{config.fleet.sharing}": an engine is on one node, and a policy '
                f"replica has {config.fleet.policy_ranks} ranks for nodes of {gpus} GPUs. Lower "
                "fleet.policy_ranks and rollout.tensor_parallel"
            )
        self._config, self._nodes, self._gpus = config, nodes, gpus
        self._counts = workers_with_spares(config) if nodes else {}
        self._needs = {pool: gpus_of_worker(config, pool) if gpus else 0 for pool in self._counts}
        self._free = [list(range(gpus)) for _ in range(nodes)]
        self._load = [0] * nodes
        self._places: dict[str, WorkerPlace] = {}
        for pool, count in self._counts.items():
            for index in range(count):
                self._places[worker_name(pool, index)] = self._first(pool, index)

    def of(self, pool: str, index: int) -> WorkerPlace | None:
        """The place of a worker; None if no node has enough GPUs that are free."""
        found = self._places.get(worker_name(pool, index))
        return found if found is not None or not self._nodes else self._beyond(pool, index)

    def on(self, node: int) -> dict[str, WorkerPlace]:
        """Workers of [fleet] on ``node``, by name."""
        return {name: place for name, place in self._places.items() if place.node == node}

    def ranks_on(self, node: int, beyond: Iterable[int] = ()) -> dict[str, range]:
        """Ranks on ``node`` of each replica that is on several; ``beyond``: numbers of replicas
        that are not of [fleet]."""
        numbers = {*range(self._counts.get(POLICY, 0)), *beyond}
        places = {worker_name(POLICY, n): self.of(POLICY, n) for n in sorted(numbers)}
        found = {name: place.ranks_on(node) for name, place in places.items() if place is not None}
        return {name: ranks for name, ranks in found.items() if ranks}

    def names(self, pool: str) -> list[str]:
        """Workers of [fleet] of one pool, on all nodes."""
        return [worker_name(pool, index) for index in range(self._counts.get(pool, 0))]

    def _first(self, pool: str, index: int) -> WorkerPlace:
        """The place of a worker that [fleet] names, which takes it."""
        pair = pair_of(self._config, worker_name(pool, index))
        if pool != POLICY and pair is not None:
            beside = self._places[worker_name(POLICY, pair)]
            return replace(beside, gpus=beside.gpus[: self._needs[pool]])
        if not self._needs[pool]:
            node = self._load.index(min(self._load))
            self._load[node] += 1
            return WorkerPlace(node)
        place = next(self._slots(pool), None)
        if place is None:
            raise BadInput(self._no_room(pool, index))
        for part in (place, *place.rest):
            self._free[part.node] = [gpu for gpu in self._free[part.node] if gpu not in part.gpus]
            self._load[part.node] += 1
        return place

    def _slots(self, pool: str) -> Iterator[WorkerPlace]:
        """Places that are free for workers of ``pool``, none of which overlap."""
        size, need = self._gpus, self._needs[pool]
        if need <= size:
            for node, free in enumerate(self._free):
                for at in range(0, len(free) - need + 1, need):
                    yield WorkerPlace(node, tuple(free[at : at + need]))
            return
        if role_of(pool) != POLICY:
            return
        whole = [node for node, free in enumerate(self._free) if len(free) == size]
        count = -(-need // size)
        gpus = [tuple(range(min(size, need - size * at))) for at in range(count)]
        for first in range(0, len(whole) - count + 1, count):
            parts = [WorkerPlace(whole[first + at], gpus[at]) for at in range(count)]
            yield replace(parts[0], rest=tuple(parts[1:]))

    def _beyond(self, pool: str, index: int) -> WorkerPlace | None:
        """The place of a worker beyond those of [fleet], from its own number alone."""
        pair = pair_of(self._config, worker_name(pool, index))
        if pool != POLICY and pair is not None:
            place = self.of(POLICY, pair)
            return place and replace(place, gpus=place.gpus[: self._needs[pool]])
        if not self._needs[pool]:
            return WorkerPlace(index % self._nodes)
        extra, slots = index - self._counts[pool], list(self._slots(pool))
        if role_of(pool) != POLICY:
            slots.reverse()
        return slots[extra] if extra < len(slots) else None

    def _no_room(self, pool: str, index: int) -> str:
        need, all_needed = self._needs[pool], gpus_needed(self._config)
        count = -(-need // self._gpus) if role_of(pool) == POLICY else 1
        where_to = "one node" if count == 1 else f"{count} nodes that are free"
        return (
            f"there is no room for {worker_name(pool, index)}, which needs {need} GPUs on "
            f"{where_to}: the workers of [fleet] need {all_needed} GPUs, and there are "
            f"{self._nodes} nodes with {self._gpus} GPUs each. Lower fleet.policy_ranks, "
            "rollout.tensor_parallel or the workers in [fleet], take more nodes, or let workers "
            "share the GPUs with --gpus 0"
        )


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
        return tuple(takewhile(lambda name: name not in ("", "-1"), named))
    found = [path.name for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    # CUDA counts the devices that it sees from 0, whatever their files are called.
    return tuple(map(str, range(len(found))))


class MachineGpus:
    """``names``: as CUDA_VISIBLE_DEVICES takes them."""

    def __init__(self, config: Config, names: Sequence[str]) -> None:
        self._config = config
        self.names = names
        self.shared = gpus_needed(config) > len(names)
        """True if [fleet] needs more GPUs than there are: workers are then dealt round."""
        self._held: dict[str, tuple[str, ...]] = {}

    def take(self, worker: str, running: Collection[str]) -> tuple[str, ...] | None:
        """GPUs that it had before, if nobody has them, or else the first free ones; None if too few
        are free. If GPUs are shared: those that it had before, or else those with the fewest
        workers. ``running``: names of the workers that run or are about to. What others had is
        free."""
        need = gpus_of_worker(self._config, pool_of_worker(worker))
        alike = {n for n in {*running, *self._held} if share_device(self._config, worker, n)}
        held = [n for n in sorted(alike - {worker}) if len(self._held.get(n, ())) >= need]
        mates = [name for name in held if name in running]
        if mates := mates or (held if worker not in self._held else []):
            self._held[worker] = self._held[mates[0]][:need]
        others = (self._held.get(name, ()) for name in running if name not in alike)
        taken = {gpu for gpus in others for gpu in gpus}
        if worker not in self._held or (not self.shared and taken.intersection(self._held[worker])):
            free = [name for name in self.names if name not in taken]
            if self.shared:
                used = (self._held.get(name, ()) for name in running if name not in alike)
                load = Counter(gpu for gpus in used for gpu in gpus)
                free = sorted(self.names, key=lambda name: load[name])
            elif need > len(free):
                return None
            self._held[worker] = tuple(free[:need])
        return self._held[worker]

    def keep(self, worker: str, environ: Mapping[str, str]) -> None:
        """``environ``: of a worker that runs already."""
        named = tuple(environ.get(VARIABLE, "").split(","))
        if set(named) <= set(self.names):
            self._held[worker] = named


def machine_gpus(config: Config, environ: Mapping[str, str]) -> MachineGpus | None:
    """GPUs of this machine; None if workers compute on none."""
    names = gpus_for(config.model.device, environ)
    return MachineGpus(config, names) if names else None


def shown(gpus: Sequence[str]) -> dict[str, str]:
    """Variables that show a process these GPUs and no others."""
    return {VARIABLE: ",".join(gpus)} if gpus else {}
