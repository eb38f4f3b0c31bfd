"""The best checkpoint outlives newer ones: its link, its export and a new run lead to its
weights."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from paceline.config.load import load_config
from paceline.v1 import rollout_pb2
from paceline_launcher.cli.up import from_override
from policy_worker.checkpoint.checkpoint import Checkpointer, read_meta
from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import addresses, config_of, running_controllers
from testbed.patience import patient
from testbed.tiny_model import make_tiny_model
from testbed.workers.fake_workers import FakeRollout
from tests.fixtures.train_states import tiny_state

BEST = 2
STEPS = 8


class RewardsTheBest(FakeRollout):
    """Every completion of the evaluation after step ``BEST`` has reward 1, those of the others
    less."""

    def group_for(self, lease: rollout_pb2.Lease) -> rollout_pb2.Group:
        group = super().group_for(lease)
        if lease.kind == rollout_pb2.TASK_KIND_EVAL:
            step = int(lease.task.task_id.removeprefix("e").partition(".")[0])
            for completion in group.completions:
                completion.reward = 1.0 if step == BEST else 0.25
        return group


async def _generate_until_it_ends(
    controllers: Controllers, trainer: subprocess.Popen[bytes]
) -> None:
    worker = RewardsTheBest(config_of(controllers), addresses(controllers), "rollout-0", tokens=8)
    await worker.start()
    working = asyncio.create_task(worker.work(lambda: False))
    async with asyncio.timeout(patient(240)):
        assert await asyncio.to_thread(trainer.wait, 240) == 0
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await worker.stop()


def _paceline(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "paceline_launcher", *arguments],
        capture_output=True,
        text=True,
        timeout=patient(240),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_best_checkpoint_is_kept_linked_exported_and_begun_with(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "one", "answer": "1"}) + "\n")
    with running_controllers(
        tmp_path,
        1,
        model={"path": str(model), "device": "cpu"},
        data={"eval_path": str(held_out)},
        train={
            "checkpoint_every": 2,
            "eval_every": 2,
            "keep_checkpoints": 1,
            "lr": 1e-3,
            "steps": STEPS,
        },
    ) as controllers:
        with (tmp_path / "policy.log").open("wb") as log:
            trainer = subprocess.Popen(
                [
                    *(sys.executable, "-m", "policy_worker", str(controllers.config)),
                    *("--controllers", ",".join(addresses(controllers)), "--id", "policy-0"),
                    *("--run-dir", str(controllers.run_dir)),
                ],
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        try:
            asyncio.run(_generate_until_it_ends(controllers, trainer))
        except (TimeoutError, subprocess.TimeoutExpired):
            raise AssertionError((tmp_path / "policy.log").read_text()[-4000:]) from None
        finally:
            trainer.kill()
            trainer.wait()
        run_dir = controllers.run_dir
    folder = run_dir / "checkpoints"
    steps = sorted(read_meta(p)["step"] for p in folder.iterdir() if not p.is_symlink())
    assert BEST in steps and STEPS in steps and 4 not in steps, steps
    best = (folder / "best").resolve(strict=True)
    assert read_meta(best)["step"] == BEST

    out = tmp_path / "exported"
    _paceline("export", str(run_dir), "--best", "--out", str(out))
    assert json.loads((out / "paceline.json").read_text())["step"] == BEST
    # What `paceline up --from` adds to the config; the checks of a start accept it, a trainer
    # begins with it.
    (override,) = from_override(folder / "best")
    assert json.loads(override.partition("=")[2]) == str(best)
    new = ["--run-dir", str(tmp_path / "new"), "--set", "run.name=new"]
    given = ["--from", str(folder / "best"), "--dry-run", *new]
    assert "ready: new" in _paceline("up", str(controllers.config), *given)
    config = load_config(controllers.config, [override])
    state = tiny_state(config)
    Checkpointer(tmp_path / "new", config).begin_with(state, str(config.model.initial_checkpoint))
    exported = load_file(out / "model.safetensors")
    for name, tensor in state.named_weights():
        if name in exported:
            assert torch.equal(tensor.detach().float(), exported[name].float()), name
