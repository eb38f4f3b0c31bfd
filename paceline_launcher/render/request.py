"""Render request: a run's configuration, the options beside it, and what follows from both."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.masking import masked
from paceline.worker_pools import POLICY, ROLLOUT, role_of, scorer_of
from paceline_launcher.node_placement import gpus_of_worker, nodes_needed, workers_with_spares
from paceline_launcher.render.options import RenderOptions, Volume

GRPC_PORT = 7000
REST_PORT = 8000
LONGEST_NAME = 40
"""Length with which names of scorers and pods fit into 63 characters."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers that can replace one another; GPUs, cores and memory are those of one."""

    name: str
    count: int
    gpus: int
    cpus: int
    memory_gib: int

    @property
    def role(self) -> str:
        return role_of(self.name)

    @property
    def scorer(self) -> str:
        return scorer_of(self.name)

    @property
    def label(self) -> str:
        """The name with "-" for "_" and ":", for files and workloads."""
        return self.name.replace(":", "-").replace("_", "-")


@dataclass(frozen=True, slots=True)
class RenderRequest:
    config: Config
    options: RenderOptions

    def check(self) -> None:
        """Raises BadInput for what no target can render."""
        config, options = self.config, self.options
        if (options.gpus_per_node is None) != (config.model.device == "cpu"):
            raise BadInput(
                "--gpus-per-node: give the number of GPUs of a node, or set model.device = "
                '"cpu" for a run without GPUs: one of the two'
            )
        scorers = config.scorers.by_name.items()
        for setting, url in (
            *(("payloads.url", url) for url in config.payloads.urls),
            ("weights.url", config.weights.url or ""),
            *((f"scorers.{name}.url", scorer.url or "") for name, scorer in scorers),
        ):
            if masked(url) != url:
                raise BadInput(
                    f"{setting} contains a password, which the rendered files would show: use an "
                    "address without one, or leave it out"
                )

    @property
    def name(self) -> str:
        """The run's name as a DNS label: prefix of every rendered name."""
        text = re.sub(r"[^a-z0-9]+", "-", self.config.run.name.lower())
        return text[:LONGEST_NAME].strip("-")

    @property
    def volumes(self) -> list[Volume]:
        return self.options.volume or []

    @property
    def environment(self) -> dict[str, str]:
        return {one.name: one.value for one in self.options.nccl_env or ()}

    @property
    def holds_run(self) -> bool:
        return any(PurePosixPath(self.run_dir).is_relative_to(v.path) for v in self.volumes)

    @property
    def run_dir(self) -> str:
        return self.options.run_dir or f"/runs/{self.name}"

    @property
    def grpc_port(self) -> int:
        return self.config.controller.port or GRPC_PORT

    @property
    def rest_port(self) -> int | None:
        rest = self.config.rest
        return (rest.port or REST_PORT) if rest.enabled else None

    @property
    def pools(self) -> list[Pool]:
        config, options = self.config, self.options
        found = []
        for name, count in workers_with_spares(config).items():
            gpus = gpus_of_worker(config, name) if options.gpus_per_node is not None else 0
            threads = int(getattr(config.fleet, f"{role_of(name)}_threads"))
            threads *= config.fleet.policy_ranks if name == POLICY else 1
            cpus = max(options.cpus * max(gpus, 1), threads)
            found.append(Pool(name, count, gpus, cpus, options.memory_gib * max(gpus, 1)))
        return found

    def check_workers_fit_nodes(self, *, spread: bool = False) -> None:
        """Raises BadInput if a worker has more GPUs than a node. ``spread``: policy replicas
        may."""
        here = self.options.gpus_per_node
        for pool in self.pools:
            if here is not None and pool.gpus > here and not (spread and pool.role == POLICY):
                settings = {
                    POLICY: "fleet.policy_ranks, or choose pytorchjob, slurm or PAI-DLC's pytorch "
                    "job, whose replicas may be on several nodes",
                    ROLLOUT: "rollout.tensor_parallel",
                }
                raise BadInput(
                    f"a {pool.name} worker has {pool.gpus} GPUs, and a node {here} "
                    "(--gpus-per-node): here a worker runs on one node. Lower "
                    f"{settings.get(pool.role, 'the GPUs of its scorer')}"
                )

    @property
    def nodes(self) -> int:
        """Nodes of a job. Raises BadInput if they are too few."""
        per_node = self.options.gpus_per_node
        if per_node is None:
            return self.options.nodes or 1
        self.check_workers_fit_nodes(spread=True)
        needed = nodes_needed(self.config, per_node)
        nodes = self.options.nodes or needed
        if nodes < needed:
            raise BadInput(
                f"--nodes {nodes}: the fleet needs {needed} nodes of {per_node} GPUs, because "
                f"workers other than policy replicas of more than {per_node} ranks are each on one "
                f"node. Give --nodes {needed}, or ask for fewer workers in [fleet]"
            )
        return nodes

    def node_cpus(self) -> int:
        """Cores of a node's share of the processes."""
        per_node = self.options.gpus_per_node
        return self.options.cpus * per_node if per_node else self._share("cpus") + 1

    def node_memory_gib(self) -> int:
        per_node = self.options.gpus_per_node
        return self.options.memory_gib * per_node if per_node else self._share("memory_gib")

    def _share(self, what: str) -> int:
        total: int = sum(getattr(pool, what) * pool.count for pool in self.pools)
        return -(-total // self.nodes)

    def worker_secrets(self) -> "Secrets":
        found = {"PACELINE_TOKEN": Secret("token"), "HF_TOKEN": Secret("hf-token", optional=True)}
        if any(scorer.url is not None for scorer in self.config.scorers.by_name.values()):
            found["PACELINE_JUDGE_KEY"] = Secret("judge-key", optional=True)
        return found

    def controller_secrets(self) -> "Secrets":
        found = self.worker_secrets()
        if self.config.redis.url is not None:
            found["REDIS_URL"] = Secret("redis-url")
        if "wandb" in self.config.metrics.sinks:
            found["WANDB_API_KEY"] = Secret("wandb-api-key")
        return found


@dataclass(frozen=True, slots=True)
class Secret:
    """A value in the run's secret, by its key."""

    key: str
    optional: bool = False


Secrets = dict[str, Secret]
"""Secrets by the names of their environment variables."""
