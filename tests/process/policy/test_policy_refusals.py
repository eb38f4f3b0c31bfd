"""A replica that the controller refuses for good ends with a clear line; any other goes on."""

import subprocess
import sys

import grpc

from controller.ledger import decisions as cmd
from paceline.config.load import to_toml
from paceline.rpc.client import RequestRefused
from policy_worker.control_plane import RefusalLimit
from testbed.patience import patient
from testbed.redis.redis_process import throwaway_redis
from testbed.tiny_model import make_tiny_model
from tests.fakes.policy_controller import SmallController
from tests.fixtures.policy_models import make_config, random_groups


def refusal(code: str = "INVALID_ARGUMENT") -> RequestRefused:
    return RequestRefused(code, "the vote is malformed")


def test_a_step_another_kind_or_a_new_incarnation_starts_the_count_again() -> None:
    refusals = RefusalLimit("policy-0")
    for _ in range(4):
        refusals.add(7, refusal())
        refusals.add(7, refusal())
        refusals.clear()
    for number in range(6):
        refusals.add(7, refusal("NOT_FOUND" if number % 2 else "INVALID_ARGUMENT"))
    for incarnation in range(6):
        refusals.add(incarnation, refusal("FAILED_PRECONDITION"))


class Refuser(SmallController):
    """Refuses every vote, and forms a new epoch whenever a member says that one failed."""

    votes = 0

    async def Vote(self, request, context):
        self.votes += 1
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "stat loss is not finite")

    async def ReportPeerError(self, request, context):
        reply = await super().ReportPeerError(request, context)
        caller = request.caller.worker_id, request.caller.incarnation
        async with self._changed:
            self.driven.do(cmd.break_mesh(*caller, request.epoch, request.detail))
            self.driven.do(cmd.form_mesh())
            self._changed.notify_all()
        return reply


def test_a_worker_refused_for_good_ends_instead_of_joining_for_ever(tmp_path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32)
    config = make_config(model=model, fleet={"heartbeat_s": 0.2})
    (tmp_path / "run.toml").write_text(to_toml(config))
    groups = [random_groups(2, group_size=2, seed=1, first=0, vocab=15)]
    with throwaway_redis(tmp_path) as url:
        controller = Refuser(url, str(tmp_path), groups, 1, config.train)
        try:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "policy_worker", str(tmp_path / "run.toml")),
                    *("--controllers", controller.address, "--id", "policy-0"),
                ],
                capture_output=True,
                text=True,
                timeout=patient(170),
            )
        finally:
            controller.end()
    assert done.returncode == 1, done.stderr
    assert controller.votes == 3
    assert done.stderr.splitlines()[-1].startswith(
        "policy_worker: the controller refused policy-0 3 times in a row: INVALID_ARGUMENT"
    )
    assert "Traceback" not in done.stderr


def test_a_worker_that_fails_ends_although_a_thread_is_stuck() -> None:
    """Alive but of no use it would never be restarted."""
    code = (
        "import threading\n"
        "from paceline.process.lifetime import leave_after\n"
        "def main():\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"
        "    raise RuntimeError('an operation does not end')\n"
        "leave_after(main)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(60)
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "RuntimeError: an operation does not end"
