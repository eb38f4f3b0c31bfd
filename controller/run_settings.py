"""Settings of the run in force: a controller's config file with what the ledger says has
changed."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from controller.context import ControllerContext
from controller.dataset_rows import DatasetRows
from controller.ledger.commands import ChangeSettings, CommandRefused, StartRun
from controller.ledger.decisions.settings import problem_of, stays_ended
from controller.ledger.state.settings import SettingChange
from controller.ledger.state.state import State
from paceline.config.changes import problem_of_change, problem_of_divisor, refusal
from paceline.config.load import ConfigError, changeable, changed_config, unknown_setting
from paceline.config.schema import Config
from paceline.errors import BadInput, RefusalCode
from paceline.ids import Step


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

    def start_command(self, rows: DatasetRows) -> StartRun:
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
        return StartRun(spec, dict(file))

    def change_command(
        self, rows: DatasetRows, request_id: str, asked: Mapping[str, Any]
    ) -> ChangeSettings:
        """Raises CommandRefused with the way that works."""
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
        # As the schema reads them: 5 is 5.0 if the setting is a float.
        read = changeable(config)
        return ChangeSettings(request_id, {name: read[name] for name in asked}, whole.live)

    def effect_of(self, command: ChangeSettings) -> dict[str, SettingChange]:
        """Changes that the command would make. Raises CommandRefused as the ledger would."""
        state = self._state()
        if state.ended:
            raise CommandRefused(RefusalCode.STOPPED, f"the run has {state.phase}")
        if why := problem_of(state, command.spec):
            raise CommandRefused(RefusalCode.INVALID, why)
        step = Step(state.versions.step + 1 + (state.steps.open is not None))
        changes = state.settings.differing(command.settings)
        return {name: SettingChange(old, new, step) for name, (old, new) in changes.items()}
