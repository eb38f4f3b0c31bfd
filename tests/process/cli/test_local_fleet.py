"""Processes of the local fleet: restarted, recorded, and never left behind."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.config import Config
from paceline.errors import BadInput
from paceline.memory_plan import SHARES_GPU
from paceline.observe.fleet_file import FleetRecord, ProcessId, ProcessRecord
from paceline.redis.server import RedisEndpoint
from paceline.rpc.client import RequestRefused
from paceline.v1 import admin_pb2
from paceline.v1.common_pb2 import ROLE_ROLLOUT
from paceline_launcher.launch import fleet as launched
from paceline_launcher.launch import passing, restarts, run, watch
from paceline_launcher.launch.child import Child, ChildSpec, end_all
from paceline_launcher.launch.fleet import Fleet
from paceline_launcher.launch.fleet_process import State
from paceline_launcher.launch.node_workers import NodeWorkers
from paceline_launcher.launch.run import Run
from paceline_launcher.launch.run_dir import clear, end_leftovers, locked
from paceline_launcher.live_view import Console
from paceline_launcher.node_placement import MachineGpus
from testbed.fleets.controllers import until
from testbed.fleets.local_run import ROOT
from tests.fakes.admin_control import AdminControl
from tests.fixtures.configs import config_of

FOREVER = "import time; time.sleep(600)"
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""
WITH_POOL = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("up", flush=True)
time.sleep(600)
"""


ACCEPTED = admin_pb2.AdminReply()


class Scripts:
    """A launcher of small scripts in place of the roles."""

    def __init__(self, tmp_path: Path, **by_role: str) -> None:
        self.run_dir = tmp_path
        self._by_role = by_role

    def _spec(self, role: str, index: int) -> ChildSpec:
        name = f"{role}-{index}"
        return ChildSpec(
            name=name,
            role=role,
            argv=(sys.executable, "-c", self._by_role.get(role, FOREVER)),
            environment=dict(os.environ),
            log=self.run_dir / "logs" / f"{name}.log",
        )

    def controller(self, index: int) -> ChildSpec:
        return self._spec("controller", index)

    def worker(self, role: str, index: int) -> ChildSpec:
        return self._spec(role, index)


def settings(**fleet: object) -> Config:
    return config_of(fleet={"controllers": 1, **fleet})


def a_fleet(
    config: Config,
    scripts: Scripts,
    control: Any,
    note: Callable[[str], None],
    gpus: MachineGpus | None = None,
    earlier: FleetRecord | None = None,
) -> Fleet:
    workers = NodeWorkers(config, gpus)
    specs: Any = scripts
    return Fleet(config, specs, scripts.run_dir, control, note, workers, earlier=earlier)


@asynccontextmanager
async def fleet_of(
    tmp_path: Path,
    config: Config,
    gpus: MachineGpus | None = None,
    started: bool = True,
    **by_role: str,
) -> AsyncIterator[tuple[Fleet, list[str]]]:
    """The fleet and what it notes; ``started``: with all its processes."""
    notes: list[str] = []
    scripts = Scripts(tmp_path, **by_role)
    fleet = a_fleet(config, scripts, AdminControl(), notes.append, gpus)
    try:
        if started:
            fleet.start_controllers()
            fleet.start_workers()
            await until(lambda: len(worker_pids(fleet)) == 1 + config.fleet.rollout)
        yield fleet, notes
    finally:
        await fleet.close()
    assert not recorded(tmp_path).survivors()


def worker_pids(fleet: Fleet) -> dict[str, int]:
    """Pid of every worker process that runs."""
    return {child.spec.name: child.pid for child in fleet.running(workers=True)}


def gpus_of(fleet: Fleet) -> dict[str, str]:
    """What every worker process that runs sees."""
    seen = {name: psutil.Process(pid).environ() for name, pid in worker_pids(fleet).items()}
    return {name: environ["CUDA_VISIBLE_DEVICES"] for name, environ in seen.items()}


def recorded(run_dir: Path) -> FleetRecord:
    record = FleetRecord.read(run_dir)
    assert record is not None
    return record


def desired(phase: str = "running", **desired: int) -> admin_pb2.StatusReply:
    return admin_pb2.StatusReply(phase=phase, desired=desired)


async def test_bad_input_of_a_worker_ends_the_run_with_its_last_line(tmp_path: Path) -> None:
    says = "import sys; print('noise'); print('model.path: no such directory'); sys.exit(2)"
    async with fleet_of(tmp_path, settings(), started=False, policy=says) as (fleet, _):
        fleet.start_workers()
        reason = await asyncio.wait_for(fleet.failed, 60)
        assert reason == "policy-0: model.path: no such directory"


async def test_a_controller_that_fails_beside_a_living_one_is_never_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched, "CALM_S", -1.0)
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.001)
    # The first one holds what both need.
    takes = f"import os, sys, time\ntry: os.mkdir({str(tmp_path / 'port')!r})\n"
    takes += "except OSError: sys.exit(2)\ntime.sleep(600)"
    config = settings(controllers=2)
    async with fleet_of(tmp_path, config, started=False, controller=takes) as (fleet, notes):
        for index in range(2):
            fleet.restarts.stands(f"controller-{index}")
        fleet.start_controllers()
        again = restarts.QUICK_FAILURES + 2
        await until(lambda: sum("starting it again" in note for note in notes) >= again)
        assert not fleet.failed.done()


async def test_a_worker_that_dies_before_it_is_ready_is_given_up_however_long_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of a large model needs minutes to start, and is then refused at each first sync."""
    monkeypatch.setattr(restarts, "CALM_S", 0.01)
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.001)
    loads = "import sys, time; time.sleep(0.1); print('no room for the KV cache'); sys.exit(1)"
    async with fleet_of(tmp_path, settings(), started=False, rollout=loads) as (fleet, _):
        fleet.start_workers()

        async def starting() -> None:
            """Registered, without weights."""
            while True:
                status = desired(policy=1, rollout=1)
                for name, pid in worker_pids(fleet).items():
                    status.workers.add(
                        worker_id=name, role=ROLE_ROLLOUT, state="running", pid=pid, version=-1
                    )
                await fleet.reconcile(status)
                await asyncio.sleep(0.005)

        asks = asyncio.create_task(starting())
        reason = await asyncio.wait_for(fleet.failed, 60)
        asks.cancel()
        assert "failed 5 times in a row" in reason and "no room for the KV cache" in reason


async def test_a_worker_that_fails_beside_one_that_works_is_never_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One broken device is no reason to end the run of all others."""
    monkeypatch.setattr(launched, "CALM_S", -1.0)
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.001)
    works = tmp_path / "works"
    works.mkdir()
    fails = f"import os, sys, time\ntry: os.rmdir({str(works)!r})\n"
    fails += "except OSError: sys.exit(1)\ntime.sleep(600)"
    config = settings(rollout=2)
    async with fleet_of(tmp_path, config, started=False, rollout=fails) as (fleet, notes):
        fleet.start_workers()
        await until(lambda: not works.exists())
        pids = worker_pids(fleet)
        status = desired(policy=1, rollout=2)
        for name, pid in pids.items():
            status.workers.add(worker_id=name, state="running", pid=pid, version=1)
        await fleet.reconcile(status)
        again = restarts.QUICK_FAILURES + 2
        await until(lambda: sum("starting it again" in note for note in notes) >= again)
        assert not fleet.failed.done()


@pytest.mark.parametrize("stopped", [False, True], ids=["hangs", "stopped"])
async def test_a_process_that_stays_dead_for_the_ledger_is_replaced(
    tmp_path: Path, stopped: bool
) -> None:
    """It hangs, and would hold its devices for ever. One that somebody has stopped may go on."""
    async with fleet_of(tmp_path, settings(rollout=1, wedged_after_s=0.05)) as (fleet, notes):
        pid = worker_pids(fleet)["rollout-0"]
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        status = desired(policy=1, rollout=1)
        status.workers.add(worker_id="rollout-0", state="dead", pid=pid)
        for _ in range(3):
            await fleet.reconcile(status)
            await asyncio.sleep(0.05)
        if stopped:
            assert psutil.pid_exists(pid) and notes == []
            status.workers[0].state = "running"
            await fleet.reconcile(status)
            os.kill(pid, signal.SIGCONT)
            return
        await until(lambda: worker_pids(fleet).get("rollout-0", pid) != pid)
        assert "rollout-0 hangs" in notes[0]


async def test_time_without_controllers_is_held_against_no_worker(tmp_path: Path) -> None:
    """It could not register: the first status after them says that it is dead."""
    async with fleet_of(tmp_path, settings(rollout=1, wedged_after_s=60.0)) as (fleet, notes):
        pid = worker_pids(fleet)["rollout-0"]
        status = desired(policy=1, rollout=1)
        status.workers.add(worker_id="rollout-0", state="dead", pid=pid)
        for _ in range(2):
            await fleet.reconcile(status)
            fleet.noted_at -= 3600.0
        await fleet.reconcile(status)
        assert notes == [] and worker_pids(fleet)["rollout-0"] == pid


async def test_a_worker_without_a_free_gpu_waits_until_one_is_free(tmp_path: Path) -> None:
    config = settings(rollout=2)
    gpus = MachineGpus(config, ("4", "5", "6"))
    async with fleet_of(tmp_path, config, gpus) as (fleet, notes):
        assert gpus_of(fleet) == {"policy-0": "4", "rollout-0": "5", "rollout-1": "6"}
        for _ in range(2):
            await fleet.reconcile(desired(policy=1, rollout=4))
        words = "waits for a free GPU: scale down or drain another worker"
        assert notes == [f"rollout-2 {words}", f"rollout-3 {words}"]
        assert fleet.processes["rollout-2"].state is State.NO_GPU
        # One that leaves makes room for the new one.
        status = desired(policy=1, rollout=2)
        pid = worker_pids(fleet)["rollout-0"]
        status.workers.add(worker_id="rollout-0", state="draining", pid=pid)
        await fleet.reconcile(status)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: fleet.processes["rollout-0"].state is State.ENDED)
        await fleet.reconcile(desired(policy=2, rollout=1))
        await until(lambda: "policy-1" in worker_pids(fleet))
        assert gpus_of(fleet) == {"policy-0": "4", "rollout-1": "6", "policy-1": "5"}


async def test_a_fleet_that_is_taken_over_keeps_its_gpus(tmp_path: Path) -> None:
    config = settings(rollout=1)
    before, after = (MachineGpus(config, ("4", "5")) for _ in range(2))
    before.take("rollout-0", ())  # the first GPU is not the policy replica's
    async with fleet_of(tmp_path, config, before) as (fleet, _):
        had = gpus_of(fleet)
        earlier = recorded(tmp_path)
        heir = a_fleet(config, Scripts(tmp_path), AdminControl(), print, after, earlier)
        assert heir.adopt_all() == 3
        kept = {child.spec.name: child.spec.environment for child in heir.running(workers=True)}
        assert {name: kept[name]["CUDA_VISIBLE_DEVICES"] for name in had} == had
        assert not any(SHARES_GPU in environ for environ in kept.values())
        after.shared = True
        assert heir._seeing(heir.running(workers=True)[0].spec, ("4",)).environment[SHARES_GPU]
        fleet.ending.set()
        await heir.close()


async def test_a_worker_that_is_killed_while_it_leaves_does_not_come_back(tmp_path: Path) -> None:
    """It came back as one that counts as leaving: the fleet had one too many for good."""
    async with fleet_of(tmp_path, settings(rollout=2)) as (fleet, notes):
        control: Any = fleet.control
        control.answers["ReportExit"] = None
        status = desired(policy=1, rollout=1)
        pid = worker_pids(fleet)["rollout-1"]
        status.workers.add(worker_id="rollout-1", state="draining", pid=pid)
        await fleet.reconcile(status)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: notes)
        assert notes == ["rollout-1 ended while it was leaving"]
        await until(lambda: control.asked("ReportExit"))
        (told,) = control.asked("ReportExit")
        assert (told.worker_id, told.pid, told.exit_code) == ("rollout-1", pid, -signal.SIGKILL)
        await until(lambda: fleet.processes["rollout-1"].state is State.ENDED)
        # Wanted again, it is started as any other.
        await fleet.reconcile(desired(policy=1, rollout=2))
        await until(lambda: worker_pids(fleet).get("rollout-1", pid) != pid)


async def test_a_worker_that_has_ended_is_asked_to_leave_once_it_is_back(tmp_path: Path) -> None:
    """The ledger had not heard of its end yet: the new process counted as leaving, and stayed."""
    async with fleet_of(tmp_path, settings(rollout=2)) as (fleet, _):
        control: Any = fleet.control
        control.answers = {"Drain": ACCEPTED, "ReportExit": None}
        process = fleet.processes["rollout-1"]
        # The second restart is delayed.
        first = worker_pids(fleet)["rollout-1"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: worker_pids(fleet).get("rollout-1", first) != first)
        os.kill(worker_pids(fleet)["rollout-1"], signal.SIGKILL)
        await until(lambda: process.state is State.WAITING)
        await fleet.reconcile(desired(policy=1, rollout=1))
        assert control.asked("Drain") == []
        await until(lambda: process.state is State.RUNNING)
        await fleet.reconcile(desired(policy=1, rollout=1))
        (asked,) = control.asked("Drain")
        assert asked.request_id == f"surplus-rollout-1-{worker_pids(fleet)['rollout-1']}"
        assert process.state is State.LEAVING


async def test_a_surplus_worker_that_has_not_registered_yet_is_asked_to_leave_once_it_has(
    tmp_path: Path,
) -> None:
    """Scaled up and down again while it loads its model: it counted as leaving, and stayed."""
    async with fleet_of(tmp_path, settings(rollout=2)) as (fleet, notes):
        control: Any = fleet.control
        control.answers["Drain"] = RequestRefused("NOT_FOUND", "no worker")
        await fleet.reconcile(desired(policy=1, rollout=1))
        assert len(control.asked("Drain")) == 1 and not notes
        control.answers["Drain"] = ACCEPTED
        for _ in range(2):
            await fleet.reconcile(desired(policy=1, rollout=1))
        assert [asked.worker_id for asked in control.asked("Drain")] == ["rollout-1"] * 2
        assert notes == ["rollout-1 is asked to leave"]


async def test_a_new_process_of_a_name_that_left_is_not_taken_for_the_one_that_left(
    tmp_path: Path,
) -> None:
    async with fleet_of(tmp_path, settings(rollout=1)) as (fleet, _):
        status = desired(policy=1, rollout=2)
        status.workers.add(worker_id="rollout-1", state="stopped", pid=1)
        await fleet.reconcile(status)
        await until(lambda: "rollout-1" in worker_pids(fleet))
        await fleet.reconcile(status)
        assert set(worker_pids(fleet)) == {"policy-0", "rollout-0", "rollout-1"}


async def test_a_worker_that_ends_well_before_the_end_is_polled_is_not_started_again(
    tmp_path: Path,
) -> None:
    async with fleet_of(tmp_path, settings(), started=False, rollout="") as (fleet, notes):
        control: Any = fleet.control
        control.answers["GetStatus"] = admin_pb2.StatusReply(phase="finished")
        fleet.start_workers()
        process = fleet.processes["rollout-0"]
        assert process.task is not None
        await asyncio.wait_for(process.task, 60)
        assert process.state is State.ENDED and fleet.finished
        assert not any("starting it again" in note for note in notes)
        assert len(next(p for p in recorded(tmp_path).processes if p.name == "rollout-0").ids) == 1


async def test_workers_of_a_run_that_is_stopped_are_not_left_alive_in_the_ledger(
    tmp_path: Path,
) -> None:
    """They were mourned when the run went on: it waited for their leases, and had a failover too
    many."""
    async with fleet_of(tmp_path, settings(), rollout=STUBBORN) as (fleet, _):
        control: Any = fleet.control
        heard_by: list[int] = []  # controllers that are stopped only then
        control.answers["ReportExit"] = lambda _: heard_by.append(len(fleet.running(workers=False)))
        log = tmp_path / "logs" / "rollout-0.log"
        await until(lambda: log.exists() and "up" in log.read_text())
        pids = worker_pids(fleet)
        await fleet.stop_workers(0.3)
        policy, rollout = pids["policy-0"], pids["rollout-0"]
        told = [(r.worker_id, r.pid, r.exit_code) for r in control.asked("ReportExit")]
        assert sorted(told) == [
            ("policy-0", policy, -signal.SIGTERM),
            ("rollout-0", rollout, -signal.SIGKILL),
        ]
        assert heard_by == [1, 1]


async def test_what_a_killed_process_left_in_its_session_is_ended(tmp_path: Path) -> None:
    spec = Scripts(tmp_path, policy=WITH_POOL).worker("policy", 0)
    child = await Child.start(spec)
    await until(lambda: "up" in spec.log.read_text())
    assert os.getsid(child.pid) == child.pid, "no interrupt of the terminal reaches it"
    pool = psutil.Process(child.pid).children()
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    assert len(pool) == 1
    await until(lambda: not pool[0].is_running() or pool[0].status() == psutil.STATUS_ZOMBIE)


async def test_workers_yield_however_nice_their_launcher_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpriority", lambda *_: 10)
    child = await Child.start(replace(Scripts(tmp_path).worker("rollout", 0), nice=5))
    assert psutil.Process(child.pid).nice() == 15
    child.kill()
    await child.wait()


async def test_a_child_that_ended_unheard_is_not_signalled(tmp_path: Path) -> None:
    child = await Child.start(Scripts(tmp_path).worker("rollout", 0))
    child.kill()
    # asyncio's own thread reaps it while the event loop does nothing.
    for thread in threading.enumerate():
        if thread.name.startswith("asyncio-waitpid"):
            thread.join(60)
    assert not psutil.pid_exists(child.pid)
    assert child.running, "not heard of yet"
    await end_all([child], 5.0)
    assert not child.running


def test_leftovers_of_a_killed_supervisor_are_ended_and_no_stranger_with_such_an_id(
    tmp_path: Path,
) -> None:
    left, stranger = (
        subprocess.Popen([sys.executable, "-c", FOREVER], start_new_session=True) for _ in range(2)
    )
    try:
        ours = ProcessId.of(left.pid)
        reused = ProcessId(stranger.pid, ProcessId.of(stranger.pid).started - 100.0)
        record = FleetRecord("run", ProcessId(1, 0.0))
        record.processes.append(ProcessRecord("policy-0", "policy", "log", ids=[reused, ours]))
        record.write(tmp_path)
        assert end_leftovers(tmp_path) == [ours]
        assert not ours.alive()
        assert stranger.poll() is None
    finally:
        for process in (left, stranger):
            process.kill()
            process.wait()


def test_one_supervisor_a_run_directory(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(BadInput, match="in use"), locked(tmp_path):
        pass


def test_fresh_removes_what_a_run_made_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    # Samples of an earlier run would be shown beside those of the new one, and count as archived;
    # the position of its alerts would skip events.
    (tmp_path / "samples").mkdir()
    for name in ("summary.json", "alerts.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    clear(settings(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


async def test_a_fleet_without_its_supervisor_is_taken_over(tmp_path: Path) -> None:
    def left_behind(code: str) -> ProcessId:
        process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        return ProcessId.of(process.pid)

    record = FleetRecord("run", ProcessId(1, 0.0))
    # The earlier fleet had a controller more than this one: nobody takes that over.
    names = ("controller-0", "controller-1", "policy-0", "rollout-0")
    ids = {name: left_behind(FOREVER) for name in names}
    for name, identity in ids.items():
        one = ProcessRecord(name, name.partition("-")[0], "log", state="running", ids=[identity])
        record.processes.append(one)
    gone = ProcessRecord("rollout-1", "rollout", "log", state="running", ids=[ProcessId(1, 0.0)])
    record.processes.append(gone)
    record.write(tmp_path)

    notes: list[str] = []
    fleet = a_fleet(settings(), Scripts(tmp_path), AdminControl(), notes.append, earlier=record)
    assert fleet.adopt_all() == 3
    await until(lambda: len(worker_pids(fleet)) == 2)
    assert all(identity.alive() for identity in ids.values())
    assert worker_pids(fleet) == {n: ids[n].pid for n in ("policy-0", "rollout-0")}
    # The missing worker comes once the ledger says that it should be there.
    await fleet.reconcile(desired(policy=1, rollout=2))
    await until(lambda: len(worker_pids(fleet)) == 3)
    # An adopted process that ends is noticed and started again, by this supervisor's own hands.
    os.kill(ids["policy-0"].pid, signal.SIGKILL)
    await until(lambda: worker_pids(fleet).get("policy-0", 0) not in (0, ids["policy-0"].pid))
    assert any("policy-0 ended (exit status unknown)" in note for note in notes)
    policy = next(p for p in recorded(tmp_path).processes if p.name == "policy-0")
    assert [i.pid for i in policy.ids] == [ids["policy-0"].pid, worker_pids(fleet)["policy-0"]]
    await fleet.close()
    assert [name for name, identity in ids.items() if identity.alive()] == ["controller-1"]
    os.kill(ids["controller-1"].pid, signal.SIGKILL)
    await until(lambda: not recorded(tmp_path).survivors())


def test_an_unreadable_record_is_no_record(tmp_path: Path) -> None:
    assert FleetRecord.read(tmp_path) is None
    (tmp_path / "fleet.json").write_text(json.dumps({"run": "x"}))
    assert FleetRecord.read(tmp_path) is None


def no_redis(*_: object, **__: object) -> RedisEndpoint:
    return RedisEndpoint("redis://127.0.0.1:1", None, "", started=False)


def a_run(run_dir: Path) -> Run:
    return Run(settings(), run_dir, Console(), NodeWorkers(settings()))


async def test_an_error_of_the_supervisor_itself_leaves_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(run, "ensure_redis", no_redis)
    monkeypatch.setattr(Fleet, "start_workers", lambda _: None)
    monkeypatch.setattr(Fleet, "start_controllers", lambda _: None)
    monkeypatch.setattr(watch, "leader_status", broken)
    with pytest.raises(OSError, match="Input/output"):
        await a_run(tmp_path).run()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "Input/output" in summary["reason"]


async def test_an_interrupt_while_a_fleet_is_taken_over_stops_it_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = a_run(tmp_path)
    taken.earlier = FleetRecord("run", ProcessId.of(os.getpid()))
    seen: list[str] = []

    async def interrupted(*_: object) -> None:
        taken._interrupts.take()
        await asyncio.sleep(0)

    async def stopped(_: object, beside: Any) -> tuple[str, str]:
        beside.close()
        return "interrupted", "stopped after step 3"

    def adopt(_: Fleet) -> int:
        seen.append("adopted")
        return 1

    monkeypatch.setattr(run, "ensure_redis", no_redis)
    monkeypatch.setattr(Run, "_write_start", interrupted)
    monkeypatch.setattr(Fleet, "adopt_all", adopt)
    monkeypatch.setattr(watch.RunWatch, "until_end", stopped)
    assert (await taken.run())["reason"] == "stopped after step 3"
    assert seen == ["adopted"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EAGAIN])
async def test_what_can_pass_is_waited_for_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A full disk, and no descriptors, processes or memory left: at a start and at a record."""
    left = {"start": 2, "write": 2}
    error = OSError(number, os.strerror(number), "/a/file")
    start, write = Child.start, FleetRecord.write

    async def starts(spec: ChildSpec) -> Child:
        left["start"] -= 1
        if left["start"] >= 0:
            raise error
        return await start(spec)

    def writes(record: FleetRecord, run_dir: Path) -> None:
        left["write"] -= 1
        if left["write"] >= 0:
            raise error
        write(record, run_dir)

    monkeypatch.setattr(passing, "AGAIN_S", 0.01)
    async with fleet_of(tmp_path, settings(), started=False) as (fleet, notes):
        monkeypatch.setattr(Child, "start", starts)
        monkeypatch.setattr(FleetRecord, "write", writes)
        fleet.start_workers()
        await until(lambda: len(worker_pids(fleet)) == 2)
        await until(lambda: len(recorded(tmp_path).survivors()) == 2)
        assert not fleet.failed.done()
        paused = [note for note in notes if note.startswith("paused")]
        assert paused and len(set(paused)) == len(paused), "once for each process"
        assert os.strerror(number) in paused[0]
        assert "/a/file. " in paused[0], "a path, then a remedy"
        assert any("goes on" in note for note in notes)


def test_a_run_whose_reader_has_gone_writes_to_its_log(tmp_path: Path) -> None:
    """``paceline up ... | head -1``, and a locale without Chinese"""
    code = (
        "import pathlib, sys; from paceline_launcher.live_view import Console, RunOutput\n"
        "console = Console(RunOutput(pathlib.Path('up.log')))\n"
        "console.note('\\u4e2d')\n"
        "for line in sys.stdin: console.note(line.strip())\n"
        "sys.exit(7)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "PYTHONIOENCODING": "ascii",
        },
        text=True,
    )
    assert run.stdin is not None and run.stdout is not None
    assert "\\u4e2d" in run.stdout.readline()
    run.stdin.write("first\n")
    run.stdin.flush()
    assert "first" in run.stdout.readline()
    run.stdout.close()
    run.stdin.write("second\nthird\n")
    run.stdin.close()
    assert run.wait(60) == 7
    log = (tmp_path / "up.log").read_text()
    assert "second" in log and "third" in log
