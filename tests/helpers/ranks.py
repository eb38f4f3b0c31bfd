"""Run as a program: a replica of real ranks that all run one scenario, for tests of replicas.

    python -m tests.helpers.ranks RANKS SCENARIO ARGUMENTS_JSON

Rank 0 prints the scenario's result as one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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


def train(
    replica: Replica,
    *,
    config: str,
    run_dir: str,
    steps: int,
    resume: str | None = None,
) -> dict[str, Any]:
    """Some steps on packed rows dealt out to the ranks, then a checkpoint and the whole weights."""
    from safetensors.torch import save_file

    from paceline.config.schema import Config
    from policy_worker.checkpoint import Checkpointer
    from policy_worker.sharding import gathered_weights, load_sharded_state, local_weights

    parsed = Config.model_validate_json(config)
    state = load_sharded_state(parsed, replica, CPU)
    checkpointer = Checkpointer(Path(run_dir), parsed, replica)
    if resume:
        checkpointer.restore(state, resume)
    losses = [_step(state, replica, state.step + 1) for _ in range(steps)]
    state.version = state.step
    info = checkpointer.save_async(state).result()
    weights = {name: tensor.contiguous() for name, tensor in gathered_weights(state)}
    if replica.leads:
        save_file(weights, Path(run_dir) / f"weights-{replica.size}-ranks.safetensors")
    checkpointer.close()
    return {
        "losses": losses,
        "checkpoint": str(info.path),
        "elements": replica.gather(sum(t.numel() for _, t in local_weights(state))),
    }


def _step(state: Any, replica: Replica, step: int) -> dict[str, float]:
    import numpy as np

    from policy_worker.batch import decode
    from policy_worker.logprobs import score
    from policy_worker.optimizer import learning_rate, set_learning_rate
    from policy_worker.packing import pack, plan_rows
    from policy_worker.sharding import squared_norm
    from policy_worker.state import local_tensor
    from tests.helpers.policy_models import random_groups

    batch = decode(random_groups(6, group_size=4, seed=step))
    last = state.model.config.vocab_size - 1
    batch.tokens.clip(0, last, out=batch.tokens)
    batch.prompt_tokens.clip(0, last, out=batch.prompt_tokens)
    rows = plan_rows(batch, np.arange(len(batch.length)), 64)
    rows = rows[: len(rows) // 2 * 2]  # a forward is collective: as many for each of two ranks
    total = 0.0
    for row in rows[replica.rank :: replica.size]:
        loss = -score(state.model, pack(batch, row, CPU), 1.0).logprobs.sum() / 100
        loss.backward()
        total += float(loss.detach())
    gradients = [local_tensor(p.grad) for p in state.model.parameters()]
    norm = float(squared_norm(gradients, replica).sqrt())
    for gradient in gradients:
        gradient.mul_(min(1.0, 1.0 / norm))
    set_learning_rate(state.optimizer, learning_rate(step, state.config.train))
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.step = step
    return {"loss": float(replica.all_sum(torch.tensor(total))), "norm": norm}


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
    if replica.leads:
        replica.end_epoch(5)
        replica.end_epoch(4)
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
    else:
        assert replica.next_command() == {"op": "stop"}


if __name__ == "__main__":
    main()
