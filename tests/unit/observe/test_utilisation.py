"""Utilisation of trainers, engines and devices: from votes and reports to all that show it."""

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from controller.diagnosis.bottleneck import shares_of, utilisation_of
from controller.fleet.flow_fractions import FlowAverage
from controller.fleet_loops import Autoscaling
from controller.ledger import decisions as cmd
from controller.ledger.specs import StatValue
from controller.ledger.step_metrics import OBSERVED
from paceline.observe.projection import Projection
from paceline.observe.runs import UTILISATION, summarise
from paceline.v1 import admin_pb2, worker_pb2
from paceline_launcher.live_view import progress_table
from tests.fixtures.ledgers import Driven


def committed(observed: dict[str, float], *compute_s: float) -> dict[str, float]:
    """Metrics of a step of 10 s by a replica with two ranks, or two replicas."""
    names = [f"p{n}" for n in range(len(compute_s))]
    run = Driven.fleet("r0")
    for name in names:
        run.register(name, ranks=2)
        run.observe(name)
        run.observe(name, state=0)
    run.fill("r0", 4)
    run.now += 10.0 - (run.now - run.state.steps.last_commit_t)
    step = run.state.steps.open
    for name, seconds in zip(names, compute_s, strict=True):
        stats = {"time_compute_s": StatValue(seconds, 1.0, seconds)} if seconds else {}
        who = (name, run.current[name], step.step, step.mesh_epoch)
        run.do(cmd.vote(*who, "same", stats, observed=observed))
    metrics: dict[str, float] = run.state.steps.metrics
    return metrics


def test_a_step_has_the_busy_share_of_its_replicas_and_tokens_of_each_device():
    metrics = committed({"engine_busy": 0.75}, 4.0, 6.0)
    assert metrics["trainer_busy"] == pytest.approx(0.5)
    assert metrics["tokens_per_s_device"] == pytest.approx(metrics["tokens_per_s"] / 4)
    assert metrics["engine_busy"] == 0.75


def test_what_was_not_measured_is_absent_and_not_all_of_the_time():
    metrics = committed({}, 0.0)
    assert not {"trainer_busy", *OBSERVED} & set(metrics)


def leader_of(flow: FlowAverage, *, recorded: bool = False) -> Any:
    state = SimpleNamespace(run=SimpleNamespace(recorded=recorded))
    config = SimpleNamespace(rollout=SimpleNamespace(tensor_parallel=2))
    context = SimpleNamespace(config=config)
    return SimpleNamespace(ledger=SimpleNamespace(state=state), flow=flow, context=context)


def report(**gauges: float) -> Any:
    return None, worker_pb2.Report(gauges=gauges)


def test_the_leader_brings_what_reports_say_of_engines_and_devices():
    run, flow = Driven.fleet("p0", "r0"), FlowAverage()
    worker = run.state.fleet.workers["r0"]
    engines = [(worker, report(engine_idle_fraction=0.2, tokens_per_s=500.0)[1])]
    trainers = [report(gpu_utilization=0.9), report(gpu_utilization=0.5)]
    flow.add(shares_of(run.state, engines, {}, trainers), 0.1, 1.0)
    found = utilisation_of(leader_of(flow))
    assert found == pytest.approx(
        {"engine_busy": 0.8, "engine_tokens_per_s_device": 250.0, "device_busy": 0.7}
    )
    assert set(found) == OBSERVED


def test_devices_of_scorers_count_too():
    run, flow = Driven.fleet("p0", "r0"), FlowAverage()
    run.register("s0", scorer="helpful", address="127.0.0.1:1")
    busy = {"p0": 0.9, "r0": 0.6, "s0": 0.3}
    sessions = {
        name: SimpleNamespace(report=report(gpu_utilization=share)[1])
        for name, share in busy.items()
    }
    scorers = SimpleNamespace(by_name={"helpful": SimpleNamespace(url=None, batch_size=1)})
    leader = SimpleNamespace(
        sessions=SimpleNamespace(of=lambda name, _: sessions[name]),
        context=SimpleNamespace(config=SimpleNamespace(scorers=scorers)),
        flow=flow,
    )
    lending = SimpleNamespace(sample=lambda state: None)
    loop: Any = SimpleNamespace(_leader=leader, _lending=lending, _samples=[])
    Autoscaling.sample(loop, run.state)
    assert flow.mean.devices == pytest.approx(0.6)


def test_while_no_engine_has_its_devices_none_is_busy():
    run, flow = Driven.fleet("p0", "r0"), FlowAverage()
    engines = [(run.state.fleet.workers["r0"], report(engine_idle_fraction=0.4)[1])]
    for tenth in range(200):  # lent to the trainers for every second second
        flow.add(shares_of(run.state, engines if tenth // 10 % 2 else []), 0.1, 1.0)
    assert utilisation_of(leader_of(flow))["engine_busy"] == pytest.approx(0.3, abs=0.03)


def test_engines_of_a_run_of_recorded_data_and_of_a_new_leader_are_not_known():
    assert utilisation_of(leader_of(FlowAverage())) == {}
    flow = FlowAverage()
    flow.add(shares_of(Driven.fleet("p0").state, []), 0.1, 1.0)
    assert utilisation_of(leader_of(flow, recorded=True)) == {}


def test_the_summary_has_means_of_the_steps_that_have_measured_it():
    run = Projection()
    for step, busy in ((1, 0.25), (2, 0.75)):
        metrics = {"trainer_busy": busy, "step_s": 1.0} | ({"mfu": 0.4} if step == 2 else {})
        event = {"type": "StepCommitted", "step": step, "version": step, "metrics": metrics}
        run.add_line({"position": f"{step}-0", "n": 0, "t": float(step), "text": "", **event})
    assert summarise(run, status="finished")["utilisation"] == {"trainer_busy": 0.5, "mfu": 0.4}


def test_top_has_a_line_of_it():
    console = Console(width=200)
    with console.capture() as shown:
        metrics = dict.fromkeys(UTILISATION, 0.5)
        console.print(progress_table(admin_pb2.StatusReply(metrics=metrics)))
    (line,) = (line for line in shown.get().splitlines() if line.strip().startswith("use"))
    assert "trainers 0.5" in line and "mfu 0.5" in line and "-" not in line
