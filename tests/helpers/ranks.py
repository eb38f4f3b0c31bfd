"""Run as a program: a replica of real ranks that all run one scenario, for tests of replicas.

    python -m tests.helpers.ranks RANKS SCENARIO ARGUMENTS_JSON

Rank 0 prints the scenario's result as one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from policy_worker.replica import Replica, follow, lead

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# What only training needs is imported there: a test of ranks that talk or die starts sooner.


def start(ranks: int, scenario: str, /, **arguments: Any) -> subprocess.Popen[str]:
    """Starts this program; read the result from its standard output."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.ranks", str(ranks), scenario, json.dumps(arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )


def run(ranks: int, scenario: str, /, **arguments: Any) -> Any:
    """Runs this program to its end and returns the scenario's result."""
    process = start(ranks, scenario, **arguments)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return json.loads(out)


def trainer(
    replica: Replica,
    *,
    config: str,
    run_dir: str,
    steps: int,
    url: str = "",
    mesh_rank: int = 0,
    mesh_size: int = 1,
    then_resume: str | None = None,
    then_hang: bool = False,
) -> dict[str, Any]:
    """Some steps through the Trainer as member ``mesh_rank`` of a mesh of replicas, and a checkpoint.

    Then, with ``then_resume``, that checkpoint instead, and as many steps from it. Whole weights go
    to ``run_dir`` as trained-, resumed- and continued-<mesh_rank>.safetensors. Then, with
    ``then_hang``, a step in which rank 1 of member 1 stops, and which member 0 therefore cannot end.
    """
    from paceline.config.schema import Config
    from policy_worker.sharding import local_weights
    from policy_worker.trainer import Epoch, Trainer

    if then_hang and mesh_rank == 1 and replica.rank == 1:
        _stop_in_reduction(2 * steps + 1)
    parsed = Config.model_validate_json(config)
    worker = Trainer(parsed, CPU, replica=replica)
    elements = replica.gather(sum(t.numel() for _, t in local_weights(worker.state)))
    if not replica.leads:
        worker.obey()
        return {}
    worker.attach(Path(run_dir))
    worker.form(Epoch(1, mesh_rank, mesh_size, url, "ranks", "127.0.0.1"), lambda: False)
    worker.restore("", 0, 0)
    trained = [_step(worker, mesh_rank, mesh_size) for _ in range(steps)]
    _save_weights(worker, Path(run_dir) / f"trained-{mesh_rank}.safetensors")
    info = worker.save().result() if mesh_rank == 0 else None
    continued = []
    if then_resume:
        worker.restore(then_resume, steps, steps)
        _save_weights(worker, Path(run_dir) / f"resumed-{mesh_rank}.safetensors")
        continued = [_step(worker, mesh_rank, mesh_size) for _ in range(steps)]
        _save_weights(worker, Path(run_dir) / f"continued-{mesh_rank}.safetensors")
    result = {
        "trained": trained,
        "continued": continued,
        "elements": elements,
        "checkpoint": str(info.path) if info else None,
    }
    if then_hang:
        if mesh_rank == 1:
            print(json.dumps(result), flush=True)
        result["freed"] = _step_until_freed(worker, mesh_rank, mesh_size)
    worker.close()
    return result


def bad_group(replica: Replica, *, config: str) -> dict[str, Any]:
    """A group that contradicts itself is handed to all ranks; then the step is trained without it."""
    from paceline.config.schema import Config
    from policy_worker.batch import BadGroup
    from policy_worker.trainer import Epoch, Trainer

    worker = Trainer(Config.model_validate_json(config), CPU, replica=replica)
    if not replica.leads:
        worker.obey()
        return {}
    worker.form(Epoch(1, 0, 1, "", "ranks", "127.0.0.1"), lambda: False)
    worker.restore("", 0, 0)
    refused = []
    for spoil in (_drop_logprob, _half_a_token):
        groups = groups_of(1)
        spoil(groups[1])
        worker.begin(_facts(worker, groups_of(1)), [])
        try:
            worker.add(groups)
        except BadGroup as error:
            refused.append(str(error))
    said = _step(worker, 0, 1)
    worker.close()
    return {"refused": refused, "version": worker.state.version, "norm": said["norm"]}


def _drop_logprob(group: Any) -> None:
    group.completions[0].logprobs = group.completions[0].logprobs[:-4]


def _half_a_token(group: Any) -> None:
    group.completions[0].tokens += b"xx"


def _stop_in_reduction(number: int) -> None:
    """This process stops when it is about to start its ``number``-th reduction, from 1."""
    from paceline.mesh import ProcessMesh

    start, count = ProcessMesh.all_reduce_async, itertools.count(1)

    def all_reduce_async(self: Any, buffer: Any) -> Any:
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGSTOP)
        return start(self, buffer)

    ProcessMesh.all_reduce_async = all_reduce_async  # type: ignore[method-assign]


def _step_until_freed(worker: Any, mesh_rank: int, mesh_size: int) -> list[Any]:
    """A step whose epoch another thread ends after 0.5 s: the error, and seconds it took to come."""
    from paceline.mesh import EpochCancelled, MeshError

    ended = threading.Timer(0.5, worker.replica.end_epoch, (1,))
    if mesh_rank == 0:
        ended.start()
    begun = time.monotonic()
    try:
        _step(worker, mesh_rank, mesh_size)
    except (EpochCancelled, MeshError) as error:
        return [type(error).__name__, time.monotonic() - begun]
    return ["none", time.monotonic() - begun]


def _step(worker: Any, mesh_rank: int, mesh_size: int) -> dict[str, Any]:
    step = worker.state.step + 1
    groups = groups_of(step)
    facts = _facts(worker, groups)
    mine = groups[mesh_rank::mesh_size]
    # Dealt in two rounds, as after the loss of a member.
    for shard in (mine[:1], mine):
        missing = worker.begin(facts, [(g.task.task_id, g.task.attempt) for g in shard])
        worker.add([g for g in mine if (g.task.task_id, g.task.attempt) in missing])
    stats = worker.reduce()
    said = {
        "loss": stats.entries["loss"][:2],
        "norm": stats.mean("grad_norm"),
        "digest": worker.digest(),
    }
    worker.commit(step)
    return said


def _facts(worker: Any, groups: list[Any]) -> Any:
    from policy_worker.gradients import StepFacts

    completions = [c for group in groups for c in group.completions]
    tokens = sum(len(c.tokens) // 4 for c in completions)
    return StepFacts(worker.state.step + 1, worker.state.version, tokens, len(completions))


def _save_weights(worker: Any, path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.clone() for name, tensor in worker.whole_weights()}, path)


def groups_of(step: int) -> list[Any]:
    """The groups of a step, the same in every process."""
    from tests.helpers.policy_models import random_groups

    # Token ids below 15, the vocabulary of the tiny model.
    groups = random_groups(5, group_size=4, seed=step, first=5 * step)
    for group in groups:
        group.prompt_tokens = _below(group.prompt_tokens, 15)
        for completion in group.completions:
            completion.tokens = _below(completion.tokens, 15)
    return groups


def _below(tokens: bytes, limit: int) -> bytes:
    import numpy as np

    return (np.frombuffer(tokens, "<i4") % limit).astype("<i4").tobytes()


def talk(replica: Replica) -> dict[str, Any]:
    """Each verb of the replica once."""
    if replica.leads:
        replica.command({"op": "greet", "words": ["ä", 1, None]})
        heard: Any = {"op": "greet", "words": ["ä", 1, None]}
    else:
        heard = replica.next_command()
    return {
        "heard": replica.gather(heard),
        "identities": replica.gather(replica.identity),
        "all_ok": replica.agree(True),
        "one_not_ok": replica.agree(replica.rank != 1),
        "bytes": len(replica.broadcast_bytes(bytes(100_000) if replica.leads else None)),
        "none": len(replica.broadcast_bytes(b"" if replica.leads else None)),
        "sum": float(replica.all_sum(torch.tensor([1.0 + replica.rank]))),
        "over": _end_epoch(replica),
        "threads": replica.gather(torch.get_num_threads()),
    }


def _end_epoch(replica: Replica) -> list[list[bool]]:
    if replica.rank == 1:
        replica.end_epoch(5)
    if replica.leads:
        replica.end_epoch(3)
    replica.barrier()
    return replica.gather([replica.epoch_over(epoch) for epoch in (4, 5, 6)])


def wait_for_death(replica: Replica, *, stopped: int | None = None) -> None:
    """Says who there is, then every rank is idle: followers wait for a command."""
    pids = replica.gather(os.getpid())
    if replica.leads:
        print(json.dumps(pids), flush=True)
        signal.pause()
    if replica.rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    replica.next_command()


def main() -> None:
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        ranks, scenario, arguments = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
        handed = json.dumps([scenario, arguments])
        replica = lead(ranks, config_json=handed, follower=("tests.helpers.ranks",))
    else:
        replica, handed = follow()
        scenario, arguments = json.loads(handed)
    result = globals()[scenario](replica, **arguments)
    if replica.leads:
        print(json.dumps(result))
        replica.close()
    elif scenario not in ("trainer", "bad_group"):  # whose followers have heard it
        assert replica.next_command() == {"op": "stop"}


if __name__ == "__main__":
    main()
