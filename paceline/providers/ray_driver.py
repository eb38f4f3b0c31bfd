"""Ray driver process: ``python -m paceline.providers.ray_driver ADDRESS RUN``.

It reads one JSON request per line (list, start, remove) and writes one JSON answer per line, and
ends with its input. It keeps no state: Ray holds the actors, in the run's namespace. An actor runs
the normal worker command on the machine that Ray chose.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.process.torchrun_environment import without_place
from paceline.worker_pools import pool_of_worker

LAUNCH = (
    "import os, sys; from paceline.process.lifetime import die_with; die_with(int(sys.argv[1]));"
    "os.execv(sys.executable, [sys.executable, '-P', '-m', *sys.argv[2:]])"
)
"""The parent death signal stays set across the exec."""


class WorkerActor:
    """Starts one worker. The worker ends with the actor, however the actor ends."""

    def __init__(
        self,
        module: str,
        config: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: str,
    ) -> None:
        """``config``: text of the TOML file. ``log``: file to append to."""
        with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
            file.write(config)
        command = [module, file.name, *arguments]
        path = Path(log)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError:
            path = Path(os.devnull)
        with path.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", LAUNCH, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**without_place(os.environ), **environment},
            )

    def look(self) -> dict[str, Any]:
        """state (running or ended), pid, exit_code (None while it runs, negative for a signal)."""
        code = self._process.poll()
        state = "running" if code is None else "ended"
        return {"state": state, "pid": self._process.pid, "exit_code": code}


ANSWER_LIMIT_S = 5.0
"""Time for an actor to report its worker's state. An actor that is not placed yet does not answer.
"""


class Driver:
    """Executes requests. Errors of Ray are raised; ``main`` reports them."""

    def __init__(self, address: str, run: str) -> None:
        import ray

        self.ray = ray
        ray.init(
            address=address,
            namespace=f"paceline-{run}",
            log_to_driver=False,
            logging_level="ERROR",
            include_dashboard=None,
        )

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["op"]:
            case "list":
                return {"placed": self.placed()}
            case "start":
                self.start(request)
            case "remove":
                self.remove(request["name"])
        return {}

    def placed(self) -> list[dict[str, Any]]:
        """Every worker that has an actor. silent: it did not answer in time. It may not be placed
        yet or be starting, or its machine may be busy or unreachable; the worker may be running."""
        from ray.util import list_named_actors

        asked = {self.ray.get_actor(name).look.remote(): name for name in list_named_actors()}
        done: list[Any] = []
        if asked:
            done, _ = self.ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_LIMIT_S)
        found = {ref: self._result(ref) for ref in done}
        return [
            {"name": name, "pool": pool_of_worker(name), **found.get(ref, {"state": "silent"})}
            for ref, name in asked.items()
        ]

    def _result(self, ref: Any) -> dict[str, Any]:
        try:
            result: dict[str, Any] = self.ray.get(ref)
            return result
        except self.ray.exceptions.RayError:
            return {"state": "ended"}

    def start(self, order: dict[str, Any]) -> None:
        # By its module's name, and not as part of this main program, so that Ray sends no code.
        from paceline.providers.ray_driver import WorkerActor

        # All ranks of a replica run on the machine of its actor.
        actor = self.ray.remote(WorkerActor).options(
            name=order["name"],
            lifetime="detached",
            num_cpus=order["cpus"],
            num_gpus=order["gpus"],
            max_restarts=0,
        )
        actor.remote(
            order["module"],
            order["config"],
            order["arguments"],
            order["environment"],
            order["log"],
        )

    def remove(self, name: str) -> None:
        with suppress(ValueError):  # it has gone already
            self.ray.kill(self.ray.get_actor(name))


def main() -> int:
    # Answers use a descriptor of their own, because Ray prints to standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    driver: Driver | None = None
    for line in sys.stdin:
        try:
            if driver is None:
                driver = Driver(sys.argv[1], sys.argv[2])
            answer = driver.answer(json.loads(line))
        except ImportError:
            answer = {"trouble": "Ray is not installed here: pip install 'paceline[ray]'"}
        except Exception as error:  # the leader shows it
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            answer = {"trouble": f"Ray at {sys.argv[1]}: {first}"}
        answers.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
