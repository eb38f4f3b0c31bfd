"""Context of a term: settings, stores, clock and data set, the same whether the controller leads or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from controller.clock import Clock
from controller.dataset_rows import DatasetRows
from controller.export.exporters import Exporters
from controller.export.run_files import RunFiles
from controller.ledger.commands import RunSpec
from controller.store.election import Election
from controller.store.journal import Journal
from controller.store.partial_rollouts import PartialStore
from controller.store.payloads import PayloadStore
from paceline.config.schema import Config
from paceline.redis.client import parse_sentinel


@dataclass(slots=True)
class ControllerContext:
    config: Config
    run_dir: Path
    controller_id: str
    redis_url: str
    journal: Journal
    election: Election
    payloads: PayloadStore
    partials: PartialStore
    config_digest: str
    config_json: str
    rows: DatasetRows
    clock: Clock
    tick_s: float = 0.05
    """How often the leader asks whom liveness would declare dead."""

    def open_exports(self, may_write: Callable[[], bool]) -> tuple[RunFiles, Exporters]:
        """What a term writes beside the journal, as long as ``may_write()``."""
        return (
            RunFiles(self.run_dir, may_write=may_write),
            Exporters(self.config, self.run_dir, may_write=may_write),
        )

    async def survives_failover(self) -> bool:
        """Whether what is durable would be found by a leader after a failover of Redis itself."""
        behind_sentinels = parse_sentinel(self.redis_url) is not None
        try:
            return await self.journal.replicated(expected=behind_sentinels)
        except (RedisError, OSError):
            return False

    def facts(self) -> RunSpec:
        """What the ledger must know of the config and the data."""
        config, rows = self.config, self.rows
        return RunSpec(
            run_id=config.run.name,
            run_name=config.run.name,
            seed=config.run.seed,
            steps=config.train.steps,
            groups_per_step=config.train.groups_per_step,
            group_size=config.rollout.group_size,
            max_staleness=config.train.max_staleness,
            max_attempts=config.fleet.max_attempts,
            dataset_rows=rows.train_rows,
            eval_rows=rows.eval_rows,
            eval_every=config.train.eval_every,
            checkpoint_every=config.train.checkpoint_every,
            filter_uninformative=config.train.filter_uninformative,
            shuffle=config.data.shuffle,
            desired={"policy": config.fleet.policy, "rollout": config.fleet.rollout},
            data_digest=rows.digest,
            config_digest=self.config_digest,
            bounds=config.fleet.bounds,
        )
