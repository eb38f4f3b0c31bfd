"""Context of a controller: its settings, stores and clock, the same whether it leads or not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from controller.dataset_rows import DatasetRows
from controller.export.exporters import Exporters, RunFiles
from controller.ledger import decisions as cmd
from controller.ledger.decisions.commands import CommandRefused
from controller.ledger.decisions.run import check_steps, stays_ended
from controller.ledger.specs import EvalSet, LearningRate, LiveSpec, RunSpec
from controller.ledger.state.settings import SettingChange
from controller.ledger.state.state import State
from controller.runtime import SYSTEM_CLOCK, Clock
from controller.store.stores import Stores
from paceline.config.changes import problem_of_change, problem_of_divisor, refusal
from paceline.config.load import (
    ConfigError,
    changeable,
    changed_config,
    fleet_digest,
    run_digest,
    unknown_setting,
)
from paceline.config.schema import Config, run_steps
from paceline.errors import BadInput, RefusalCode
from paceline.ids import Step
from paceline.observe.projection import Projector
from paceline.redis.client import parse_sentinel
from paceline.redis.leader_lease import LeaderIdentity
from paceline.worker_pools import desired_workers, limits_of


@dataclass(slots=True)
class ControllerContext:
    config: Config
    run_dir: Path
    identity: LeaderIdentity
    stores: Stores
    clock: Clock = SYSTEM_CLOCK
    tick_s: float = 0.05  # How often the leader asks whom liveness would declare dead
    config_digest: str = field(init=False)
    """Digest of the settings that all processes of the run must share now."""
    config_json: str = field(init=False)
    run_digest: str = field(init=False)  # Digest of the settings that are fixed for the run
    run_json: str = field(init=False)
    projector: Projector = field(init=False)

    def __post_init__(self) -> None:
        self.config_digest, self.config_json = fleet_digest(self.config)
        self.run_digest, self.run_json = run_digest(self.config)
        self.projector = Projector(self.run_dir)

    def open_exports(self) -> tuple[RunFiles, Exporters]:
        """Open what a term writes beside the journal, as long as it holds the lease."""

        def may_write() -> bool:
            return self.stores.election.holds_lease

        exporters = Exporters(
            self.config,
            self.run_dir,
            self.stores.payloads,
            self.projector,
            may_write=may_write,
        )
        return RunFiles(self.run_dir, may_write=may_write), exporters

    async def survives_failover(self) -> bool:
        """True if what is durable would be found by a leader after a failover of Redis itself."""
        behind_sentinels = parse_sentinel(self.stores.url) is not None
        try:
            return await self.stores.journal.replicated(expected=behind_sentinels)
        except (RedisError, OSError):
            return False

    def run_spec(self, rows: DatasetRows, config: Config) -> RunSpec:
        """The spec: what the ledger must know of the data and of ``config``: this controller's,
        with the settings that are in force."""
        return RunSpec(
            run_id=config.run.name,
            run_name=config.run.name,
            seed=config.run.seed,
            steps=run_steps(config, rows.train_rows),
            groups_per_step=config.train.groups_per_step,
            group_size=config.rollout.group_size,
            max_staleness=config.train.max_staleness,
            max_attempts=config.fleet.max_attempts,
            dataset_rows=rows.train_rows,
            eval_rows=min(rows.held_out_rows, config.train.eval_limit),
            eval_every=config.train.eval_every,
            checkpoint_every=config.train.checkpoint_every,
            filter_uninformative=config.train.filter_uninformative,
            shuffle=config.data.shuffle,
            desired=desired_workers(config),
            data_digest=rows.digest,
            config_digest=self.run_digest,
            bounds=limits_of(config),
            late_groups=config.train.late_groups,
            max_nonfinite_steps=config.train.max_nonfinite_steps or 0,
            early_stop_evals=config.train.early_stop_evals,
            eval_drop=config.train.eval_drop,
            max_token_age=config.train.token_age,
            recorded=config.recorded,
            eval_sets=_eval_sets(rows, config),
            relay_fanout=config.relay_fanout,
            stores_weights=config.weights.url is not None,
            best_metric=config.evaluation.best_metric or "",
            sources=rows.sources,
            lr=LearningRate(
                config.train.optimizer.lr,
                config.train.optimizer.schedule,
                config.train.optimizer.warmup_steps,
                config.train.optimizer.min_lr_ratio,
            ),
        )


def _eval_sets(rows: DatasetRows, config: Config) -> tuple[EvalSet, ...]:
    """The named sets, by name: two configs that list them in another order are of one run."""
    return tuple(
        EvalSet(
            name,
            min(rows.eval_rows(name), of.limit),
            of.samples,
            of.every or 0,
            of.solved_at,
        )
        for name, of in sorted(config.evaluation.sets.items())
    )


class RunSettings:
    def __init__(self, context: ControllerContext, state: Callable[[], State]) -> None:
        self._context = context
        self._state = state
        self._values: dict[str, Any] = {}
        self._config = context.config

    @property
    def config(self) -> Config:
        """Config of the run now. What is read at a process's start may still be older in some."""
        values_now = self._state().settings.values
        if values_now != self._values:
            self._values = dict(values_now)
            self._config = changed_config(self._context.config, self._values)
        return self._config

    def edited(self) -> dict[str, Any]:
        """Settings of the config file that the run does not know as its leader's; none before it
        begins."""
        known = self._state().settings
        return known.edited(self._file) if known.configured else {}

    @cached_property
    def _file(self) -> dict[str, Any]:
        """Values of the config file that a run may change. A standby looks at it several times a
        second."""
        return changeable(self._context.config)

    def start_command(self, rows: DatasetRows) -> cmd.Command[None]:
        """Command of a new leader: what was edited in its config file comes into force. Raises
        ConfigError."""
        file = self._file
        state = self._state()
        known = state.settings
        before = changed_config(self._context.config, known.values)
        config = changed_config(self._context.config, {**known.values, **known.edited(file)})
        spec = self._context.run_spec(rows, config)
        why = problem_of_divisor(before, config)
        if why and not stays_ended(state, spec.steps):
            raise ConfigError(why)
        return cmd.start_run(spec, dict(file))

    def checked_change(
        self, rows: DatasetRows, asked: Mapping[str, Any]
    ) -> tuple[dict[str, Any], LiveSpec]:
        """The settings as the schema reads them, and what follows from them. Raises CommandRefused
        with the way that works."""
        for name in asked:
            if why := unknown_setting(name) or refusal(name):
                raise CommandRefused(RefusalCode.INVALID, why)
        if not asked:
            raise CommandRefused(RefusalCode.INVALID, "name a setting to change")
        try:
            config = changed_config(self.config, asked)
        except ConfigError as error:
            raise CommandRefused(RefusalCode.INVALID, str(error)) from error
        if why := problem_of_change(self._context.config, self.config, config):
            raise CommandRefused(RefusalCode.INVALID, why)
        try:
            whole = self._context.run_spec(rows, config)
        except BadInput as error:
            raise CommandRefused(RefusalCode.INVALID, str(error)) from error
        read = changeable(config)  # 5 is 5.0 if the setting is a float
        return {name: read[name] for name in asked}, whole.live

    def effect_of(self, settings: Mapping[str, Any], spec: LiveSpec) -> dict[str, SettingChange]:
        """Changes that these settings would make. Raises CommandRefused as the ledger would."""
        state = self._state()
        if state.ended:
            raise CommandRefused(RefusalCode.STOPPED, f"the run has {state.phase}")
        check_steps(state, spec)
        step = Step(state.versions.step + 1 + (state.steps.open is not None))
        changes = state.settings.differing(settings)
        return {name: SettingChange(old, new, step) for name, (old, new) in changes.items()}
