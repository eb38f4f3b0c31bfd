"""Ray driver process: ``python -m paceline.providers.ray_driver ADDRESS RUN``.

It reads one JSON request per line (list, start, remove) and writes one JSON answer per line, and
ends with its input. It keeps no state: Ray holds the placement groups and actors, in the run's
namespace. An actor runs the normal worker command on the machine that Ray chose.
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
        self.run = run
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
        """Every worker that has a placement group. If its actor is gone, the worker has ended.
        pending: it is not placed yet. silent: it is placed, but its actor did not answer in time.
        The actor may be starting, or its machine may be busy or unreachable; the worker may be
        running."""
        from ray.util import list_named_actors, placement_group_table

        prefix = f"paceline-{self.run}:"
        groups = {
            str(group["name"]).removeprefix(prefix): str(group["state"])
            for group in placement_group_table().values()
            if str(group["name"]).startswith(prefix) and group["state"] != "REMOVED"
        }
        actors = set(list_named_actors())
        asked = {self.ray.get_actor(n).look.remote(): n for n in groups if n in actors}
        done: list[Any] = []
        if asked:
            done, _ = self.ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_LIMIT_S)
        found = {asked[ref]: self._result(ref) for ref in done}
        unheard = {
            name: ("silent" if state == "CREATED" else "pending") if name in actors else "ended"
            for name, state in groups.items()
        }
        return [
            {"name": name, "pool": pool_of_worker(name), **found.get(name, {"state": state})}
            for name, state in unheard.items()
        ]

    def _result(self, ref: Any) -> dict[str, Any]:
        try:
            result: dict[str, Any] = self.ray.get(ref)
            return result
        except self.ray.exceptions.RayError:
            return {"state": "ended"}

    def start(self, order: dict[str, Any]) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # By its module's name, and not as part of this main program, so that Ray sends no code.
        from paceline.providers.ray_driver import WorkerActor

        bundle = {"CPU": float(order["cpus"])}
        if order["gpus"]:
            bundle["GPU"] = float(order["gpus"])
        # STRICT_PACK: all ranks of a replica run on one machine.
        group = placement_group(
            [bundle],
            strategy="STRICT_PACK",
            name=f"paceline-{self.run}:{order['name']}",
            lifetime="detached",
        )
        actor = self.ray.remote(WorkerActor).options(
            name=order["name"],
            lifetime="detached",
            num_cpus=order["cpus"],
            num_gpus=order["gpus"],
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
        )
        actor.remote(
            order["module"],
            order["config"],
            order["arguments"],
            order["environment"],
            order["log"],
        )

    def remove(self, name: str) -> None:
        from ray.util.placement_group import get_placement_group, remove_placement_group

        # ValueError: already gone.
        with suppress(ValueError):
            self.ray.kill(self.ray.get_actor(name))
        with suppress(ValueError):
            remove_placement_group(get_placement_group(f"paceline-{self.run}:{name}"))


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
