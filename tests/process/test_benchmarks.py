"""Benchmarks that drive controllers from outside still get in, and those of fleets can begin."""

import json
import os
import subprocess
import sys
from pathlib import Path

from testbed.patience import patient

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = dict(os.environ)
"""As it is before any test: vLLM leaves torchrun's variables in the process that it ran in."""


def run(*words: str) -> None:
    """Python with these words, as a process: tests import no benchmarks."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
        timeout=patient(240),
    )
    assert done.returncode == 0, done.stderr


def test_the_control_plane_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "row.json"
    short = ["--clients", "1", "--payloads", "16x16", "--seconds", "0.5", "--warm-up", "0.5"]
    run("-m", "benchmarks.control_plane", *short, "--out", str(out))
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["payload"], row["clients"]) == ("16x16", 1)


def test_the_planner_says_of_a_published_run_what_its_page_says(tmp_path: Path) -> None:
    out = tmp_path / "planner.json"
    run("-m", "benchmarks.planner", "--only", "DORA 32B", "--out", str(out))
    page = json.loads((ROOT / "benchmarks/results/planner.json").read_text())
    rows = [row for row in page["rows"] if row["system"] == "DORA 32B"]
    assert len(rows) == 2 and json.loads(out.read_text())["rows"] == rows
    bar = page["bar"]
    assert bar["median_error"] <= 0.12
    assert bar["worst_error"] <= 0.25
    assert bar["signs_right"]
    assert bar["one_row_inside"]


SCALING = """
import asyncio, sys
from pathlib import Path
from benchmarks.scaling.__main__ import Batch, Cell, DeviceTimes, generation_rate
from benchmarks.scaling.few_devices import arms, lending_arms
from benchmarks.scaling.fleet import _config
from paceline.config.load import load_config
cell = Cell(2, 1, Batch(2, 4), DeviceTimes(slots=4))
config = load_config(_config(cell, Path(sys.argv[1])))
assert (config.fleet.rollout, config.train.max_staleness) == (2, 1), config
lent = [arm for _, arm in lending_arms(4, cell.times)]
for arm in [*arms(4, cell.batch, cell.times), *lent]:
    load_config(_config(arm, Path(sys.argv[1])))
assert len(lent) == 6 and lent[0].fleet == {}, lent
assert asyncio.run(generation_rate(cell.times, 0.5)) > 0
"""
ATTRIBUTION = """
import json
from pathlib import Path
from benchmarks.attribution.__main__ import KINDS, attributed_share
found = json.loads(Path("benchmarks/results/attribution.json").read_text())
assert {one["kind"] for one in found["injections"]} == KINDS.keys()
assert attributed_share(found["injections"], found["other_faults"]) == found["share"]
"""


def test_benchmarks_of_whole_fleets_have_their_cases_and_measure_alike(tmp_path: Path) -> None:
    """The fleets themselves run for minutes: here a baseline is measured, and results are counted
    again."""
    run("-c", SCALING + ATTRIBUTION, str(tmp_path))


IN_TURN = """
import torch
from benchmarks.n_plus_n.in_turn import GAE_LAMBDA, gae
from policy_worker.objectives.ppo import gae as ours
torch.manual_seed(0)
rewards, values = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
trained = torch.tensor([[0., 0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 0, 0]])
for r, v in zip(rewards, values):
    flat = [x.flatten() for x in (r, v, trained)]
    line = torch.arange(3).repeat_interleave(7)
    wanted = ours(*flat, line, gamma=1.0, lam=GAE_LAMBDA)
    for mine, theirs in zip(gae(r * trained, v * trained, trained), wanted):
        torch.testing.assert_close(mine.flatten(), theirs)
"""
STAND_IN = """
import torch
from benchmarks.versus_trl.async_trainer import attention
torch.manual_seed(0)
queries, keys = [2, 1, 4], [5, 1, 4]
query, key, value = torch.randn(7, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
starts = [torch.tensor([0, *n]).cumsum(0) for n in (queries, keys)]
made = attention(query, key, value, *starts, 4, 5, softmax_scale=0.3)
parts = zip(query.split(queries), key.split(keys), value.split(keys), made.split(queries))
for q, k, v, found in parts:
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, 1)) * 0.3
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    wanted = torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(2, 1))
    torch.testing.assert_close(found, wanted)
"""


def test_what_stands_for_other_systems_computes_what_they_compute() -> None:
    """Generalised advantages of PPO in one process, and attention of variable lengths."""
    run("-c", IN_TURN + STAND_IN)
