"""Status of a run as a protobuf message: phase, counts, workers and controllers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from controller.directives import ROLES, message_of
from controller.leader import Leader
from controller.ledger import views
from controller.ledger.decisions.hosts import fault_window_s
from controller.ledger.decisions.membership import desired_spares
from controller.ledger.enums import Lifecycle, Phase, Role
from controller.ledger.state.fleet import Worker
from controller.ledger.state.settings import SettingChange
from controller.ledger.state.state import State
from controller.replicated_controller import Controller
from paceline.config.objectives import FAMILY
from paceline.config.schema import Config
from paceline.v1 import admin_pb2

FEWEST_STEPS = 3
UNLEARNED = 0.9  # A run learns next to nothing from this share of groups whose rewards are equal
REWARDLESS = ("distill", "kto")  # Objectives that learn from equal rewards, or from none
SILENT_S = 5.0  # A controller renews its entry in Redis every second


def status_of(controller: Controller) -> admin_pb2.StatusReply:
    """Status of the run, from a leader's live ledger or a standby's copy."""
    leader, state, reply = controller.leader, controller.state, status_head(controller)
    if spares := desired_spares(state):
        reply.spares["rollout"] = spares
    if leader is not None:
        reply.provider_trouble = leader.provider_trouble
        if leader.proposal is not None:
            reply.proposed.update(leader.proposal.desired)
            reply.proposed_why = leader.proposal.why
    reply.changed.extend(setting_changes(state.settings.changed))
    reply.workers.extend(_worker(state, one, leader) for one in state.fleet.workers.values())
    reply.hosts.extend(_hosts(state, controller.clock.time()))
    reply.controllers.extend(admin_pb2.ControllerStatus(**c) for c in controllers_of(controller))
    return reply


def _hosts(state: State, now: float) -> Iterator[admin_pb2.HostStatus]:
    since = now - fault_window_s(state)
    for name, host in sorted(state.fleet.hosts.by_name.items()):
        if host.blocked or host.incidents(since):
            faults = host.incidents(since)
            yield admin_pb2.HostStatus(host=name, faults=faults, blocked=host.blocked)


def setting_changes(changes: Mapping[str, SettingChange]) -> list[admin_pb2.SettingChange]:
    return [
        admin_pb2.SettingChange(
            name=name, old=json.dumps(one.old), new=json.dumps(one.new), step=one.step
        )
        for name, one in changes.items()
    ]


def status_head(controller: Controller) -> admin_pb2.StatusReply:
    """The status without workers, controllers and proposals. Before the run has begun: its name,
    and what it waits for."""
    config, state, trouble = controller.config, controller.state, trouble_of(controller)
    spec, glance = state.run_spec, controller.context.projector.glance
    if taught_nothing := unlearned(config, glance.steps):
        taught_nothing = f"the run {taught_nothing}. `paceline why` names causes"
    return admin_pb2.StatusReply(
        run_id=config.run.name,
        run_name=config.run.name,
        phase=views.phase(state) if state.ended or not trouble else trouble,
        reason=views.beside_steps(state) if state.phase is Phase.OPEN else state.reason,
        leader=state.leader,
        term=state.term,
        step=state.versions.step,
        total_steps=spec.steps if spec else config.train.steps or 0,
        version=state.versions.version,
        mesh_epoch=state.fleet.mesh_epoch,
        tasks=message_of(admin_pb2.TaskCounts, views.counts(state)),
        desired=state.desired,
        metrics=state.steps.metrics,
        failovers=state.failovers,
        mesh_rebuilds=state.fleet.mesh_rebuilds,
        checkpoint_step=state.versions.checkpoint.step,
        reward_trouble="; ".join(filter(None, (glance.reward_trouble, taught_nothing))),
        seats=seats_of(state, controller.clock.time()),
        training_seats=state.fleet.seats.training,
        time_left_s=time_left_s(controller) or 0.0,
    )


def time_left_s(controller: Controller) -> float | None:
    """Until the run's last step, by the median of the newest, as of the projector's last glance: a
    step that waited for a fault to be repaired says nothing about the rate. None: unknown, or the
    run is over."""
    state, known = controller.state, step_seconds(controller)
    total = state.run_spec.steps if state.run_spec else controller.config.train.steps or 0
    if state.ended or not known or total < state.versions.step:
        return None
    return (total - state.versions.step) * median(known)


def step_seconds(controller: Controller) -> list[float]:
    """Durations of the newest steps that are known."""
    rows = controller.context.projector.glance.steps
    return [row["step_s"] for row in rows if row.get("step_s") is not None]


def unlearned(config: Config, steps: Sequence[Mapping[str, Any]]) -> str:
    """The reason why these steps, oldest first, taught nothing; empty if they did, or if too few
    are known. Groups of equal rewards have no advantage, unless it is relative to all groups."""
    rows = [row for row in steps if row.get("zero_variance_share") is not None]
    if len(rows) < FEWEST_STEPS or config.train.algorithm in REWARDLESS:
        return ""
    share = sum(row["zero_variance_share"] for row in rows) / len(rows)
    relative = config.train.algorithm in FAMILY and config.train.loss.advantage != "step"
    alike = all(not row.get("reward_std") for row in rows)
    if share < UNLEARNED or not (alike or relative or config.train.algorithm == "online_dpo"):
        return ""
    mean = sum(row.get("reward_mean") or 0.0 for row in rows) / len(rows)
    return (
        f"learns next to nothing: the rewards within {share:.0%} of the groups of the last "
        f"{len(rows)} steps are all equal (zero_variance_share), their mean is {mean:.3g}"
    )


def seats_of(state: State, now: float) -> list[admin_pb2.SeatStatus]:
    """Who holds the devices that workers use in turn, since when, and why. By name."""
    living = [w for role in Role for w in state.fleet.living(role)]
    return [
        admin_pb2.SeatStatus(
            name=name,
            role=str(seat.role or ""),
            holder=seat.holder[0] if seat.holder else "",
            asked=seat.asked,
            since_s=round(max(0.0, now - seat.since), 3) if seat.since else 0.0,
            why=seat.why,
            members=sorted(w.worker_id for w in living if w.seat == name),
        )
        for name, seat in sorted(state.fleet.seats.by_name.items())
    ]


def trouble_of(controller: Controller) -> str:
    """Reason why the controller stands still; empty if it does not."""
    return controller.leader.trouble if controller.leader is not None else controller.trouble


def controllers_of(controller: Controller) -> Iterator[dict[str, Any]]:
    """Every controller seen lately, by the names of ``ControllerStatus``'s fields."""
    leader = controller.state.leader
    now = controller.clock.time()
    for controller_id, seen in sorted(controller.peers.items()):
        age_s = max(0.0, now - seen["t"])
        # The ledger names the leader: the process's own entry may be out of date.
        state = "leader" if controller_id == leader else "standby"
        yield {
            "controller_id": controller_id,
            "address": seen["address"],
            "rest": str(seen.get("rest") or ""),
            "state": state if age_s < SILENT_S else "silent",
            "pid": seen["pid"],
            "host": seen["host"],
            "heartbeat_age_s": round(age_s, 3),
        }


def _worker(state: State, worker: Worker, leader: Leader | None) -> admin_pb2.WorkerStatus:
    mesh, epoch = state.fleet.mesh, 0
    if mesh is not None and not mesh.broken and mesh.rank(*worker.who) >= 0:
        epoch = mesh.epoch
    status = message_of(
        admin_pb2.WorkerStatus,
        worker,
        role=ROLES[worker.role],
        state=str(worker.lifecycle),
        mesh_epoch=epoch,
        version=worker.state_version if worker.role is Role.POLICY else worker.loaded_version,
        held_leases=len(worker.held),
        heartbeat_age_s=-1.0,  # only the leader receives heartbeats
    )
    if worker.spare and worker.lifecycle is Lifecycle.RUNNING:
        status.state = "spare"
    if worker.lifecycle is Lifecycle.RUNNING and state.fleet.shuns(worker):
        status.state = "blocked"
    # A launcher that saw only the lower desired count would stop a second worker.
    if worker.alive and worker.leaving:
        status.state = "draining"
    if worker.alive and leader is not None:
        leader.describe(worker, status)
    return status
