"""Seconds that checkpoints to a disk of 500 MB/s hold up a thread that computes in short ticks."""

import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from unittest import mock

from torch import nn

from benchmarks import runs
from paceline.config.schema import Config
from paceline.ids import Step, Version
from paceline.process.compute_device import pick_device
from policy_worker.checkpoint.checkpoint import Checkpointer
from policy_worker.model.train_state import TrainState
from policy_worker.step.optimizer import build_optimizer


def saves(millions: int, folder: str) -> list[dict[str, float]]:
    config = Config.model_validate({"model": {"path": "unused"}, "data": {"path": "unused"}})
    device, rows = pick_device("auto"), list[dict[str, float]]()
    layers = [nn.Linear(1000, 1000, False, device) for _ in range(millions)]
    weight, parts = layers[0].weight.detach(), dict[str, nn.Module](policy=nn.Sequential(*layers))
    state = TrainState(parts, build_optimizer(parts, config.train), Step(0), Version(0), config)
    (checkpointer := Checkpointer(Path(folder), config, device=device)).reserve(state)
    for _ in range(2):
        time.sleep(2)  # before the first one is due
        times = [time.perf_counter()]
        saved = checkpointer.save_async(state)
        while len(times) < 3 or not saved.done():
            times.append(time.perf_counter())
            weight.mm(weight[:, :32])
        save, *ticks = (end - begun for begun, end in pairwise(times))
        row = {"save_s": save, "longest_tick_s": max(ticks), "durable_s": saved.result().seconds}
        rows.append({"millions": millions, **row})
    return rows


if __name__ == "__main__":
    out = runs.options("checkpoint", __doc__, "checkpoint").parse_args().out
    disk = mock.patch("os.fsync", lambda file: time.sleep(os.fstat(file).st_size / 500e6))
    with tempfile.TemporaryDirectory() as folder, disk:
        rows = [*saves(50, folder), *saves(200, folder)]
    runs.write(out, {"machine": runs.machine(), "rows": rows})
