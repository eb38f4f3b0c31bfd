"""Run as a program: kills a saving process again and again and looks at what it leaves behind.

    python kill_while_saving.py FOLDER TRIALS SEED

Each trial forks a process that writes checkpoints of steps 1, 2, 3, ... (step 3 twice, so that a
replacement is hit as well) and ends it with SIGKILL at a random instant. All tensors of step n hold
the value n. Prints a JSON object with counts; a checkpoint that is there but not right is an error.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from paceline.config.schema import Config
from policy_worker.checkpoint import Checkpointer, complete_checkpoints
from policy_worker.optimizer import build_optimizer
from policy_worker.state import TrainState

STEPS = (1, 2, 3, 3, 4, 5)


def make_state(config: Config) -> TrainState:
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(4)))
    return TrainState(model, build_optimizer(model, config.train), 0, 0, config)


def fill(state: TrainState, step: int) -> None:
    state.step = state.version = step
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.fill_(step)
            for moment in state.optimizer.state[parameter].values():
                moment.fill_(step)


def saver(folder: Path, config: Config, started: int) -> None:
    state = make_state(config)
    checkpointer = Checkpointer(folder, config)
    os.write(started, b"x")
    for step in STEPS:
        fill(state, step)
        saved = checkpointer.save_async(state)
        fill(state, -1)  # the next step begins while the snapshot is being written
        saved.result()
    os.write(started, b"done")


def check(folder: Path, config: Config, before: int) -> int:
    """Newest step after a kill. Every complete checkpoint must load and be of one step throughout."""
    newest = 0
    for path in complete_checkpoints(folder):
        state = make_state(config)
        Checkpointer(folder, config).restore(state, path)
        newest = int(path.name.removeprefix("step-"))
        assert state.step == newest, path
        for parameter in state.model.parameters():
            for tensor in (parameter, *state.optimizer.state[parameter].values()):
                assert bool((tensor == newest).all()), path
    assert newest >= before, f"checkpoint {before} is gone, newest is {newest}"
    return newest


def main(folder: Path, trials: int, seed: int) -> None:
    torch.set_num_threads(1)
    config = Config.model_validate({"model": {"path": "none"}, "data": {"path": "none"}})
    chance = random.Random(seed)
    killed = unfinished = 0
    longest = 0.2
    seen: dict[int, int] = {}
    for trial in range(trials):
        run = folder / f"run-{trial // 4}"  # some trials start among an earlier one's litter
        newest_before = check(run, config, 0)
        ready, started = os.pipe()
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            saver(run, config, started)
            os._exit(0)
        os.close(started)
        os.read(ready, 1)
        begun = time.monotonic()
        # Waits for the end of the writer, but no longer than a random time.
        ended, _, _ = select.select([ready], [], [], chance.uniform(0, longest))
        if ended:
            longest = max(0.02, time.monotonic() - begun)
        else:
            os.kill(child, signal.SIGKILL)
            killed += 1
        os.waitpid(child, 0)
        os.close(ready)
        unfinished += any(p.name.startswith(".") for p in (run / "checkpoints").glob(".*"))
        newest = check(run, config, newest_before)
        seen[newest] = seen.get(newest, 0) + 1
    print(json.dumps({"killed": killed, "left_unfinished": unfinished, "newest": seen}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
