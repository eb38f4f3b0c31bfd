"""Collection of the evidence for a diagnosis from a controller, and the diagnosis as messages.

Everything is in memory but the kernel's view of silent processes of this machine: a few reads of
/proc. At 1,000 workers it is about 10 ms of the leader's time, once for each request.
"""

import math
import socket
from collections.abc import Iterable

from controller.diagnosis.bottleneck import Bottleneck, bottleneck_of, pace_of
from controller.diagnosis.diagnose import diagnose
from controller.diagnosis.evidence import Culprit, CulpritKind, Evidence, WorkerEvidence
from controller.directives import message_of
from controller.leader import Leader
from controller.ledger.state.fleet import Worker
from controller.replicated_controller import Controller
from controller.status import trouble_of, unlearned
from paceline.masking import masked
from paceline.observe.vocabulary import Severity
from paceline.process import waits
from paceline.process.kernel_state import KernelState, kernel_state
from paceline.process.waits import Wait, WaitKind
from paceline.redis.server import embedded_pid, out_of_reach
from paceline.v1 import admin_pb2, worker_pb2
from paceline.weights.weight_store import THE_STORE
from paceline.worker_pools import desired_workers

KERNEL_AFTER_S = 1.0  # the kernel is asked about processes that are silent for so long
REPLIED = {Severity.INFO: "ok", Severity.WARNING: "slow", Severity.ERROR: "stuck"}
"""Severities in replies: nothing is late, something takes longer than usual, or the run or a
process stands still."""


def why_of(controller: Controller) -> admin_pb2.WhyReply:
    pace = _pace(controller)
    found = diagnose(evidence_of(controller, pace.sentence if pace is not None else ""))
    return message_of(
        admin_pb2.WhyReply,
        found,
        culprit=message_of(admin_pb2.Culprit, found.culprit),
        sentence=found.sentence,
        severity=REPLIED[found.severity],
        controller_id=controller.identity.controller_id,
        leads=controller.leader is not None,
        bottleneck=pace.kind if pace is not None else "",
        pace=pace.sentence if pace is not None else "",
        faults=controller.context.projector.glance.faults,
    )


def evidence_of(controller: Controller, pace: str = "") -> Evidence:
    """``pace``: the bottleneck, in a sentence."""
    leader, state, now = controller.leader, controller.state, controller.clock.monotonic()
    config, trouble = controller.config, trouble_of(controller)
    began_t = max(state.started_t, state.steps.last_commit_t)
    # From the first moment: appends that fail at once are in trouble before they are a second old.
    own = tuple(waits.present(0.0))
    redis_pid = None
    if config.redis.url is None and (trouble or any(w.kind is WaitKind.STORE for w in own)):
        redis_pid = embedded_pid(controller.run_dir)
    redis = "the run's own Redis"
    if config.redis.url is not None:  # without its password
        redis = f"Redis at {config.redis.url.rpartition('@')[2].rpartition('//')[2]}"
    living = (w for w in state.fleet.workers.values() if w.alive)
    own_store = out_of_reach(controller.run_dir, config.redis) or redis
    stores = ", ".join(map(masked, config.payloads.urls)) or own_store
    return Evidence(
        state,
        config.fleet,
        controller_id=controller.identity.controller_id,
        leads=leader is not None,
        trouble=trouble,
        trouble_s=0.0 if leader is not None else controller.troubled_s,
        redis=redis,
        payloads=f"the payload store ({stores})",
        weights=f"{THE_STORE} ({masked(config.weights.url or '')})",
        redis_kernel=kernel_state(redis_pid) if redis_pid else None,
        redis_pid=redis_pid or 0,
        leader=_leader(controller),
        own_waits=own,
        workers=() if leader is None else tuple(_worker(leader, w, now) for w in living),
        now_t=controller.clock.time(),
        since_commit_s=max(0.0, controller.clock.time() - began_t) if began_t else 0.0,
        usual_step_s=state.steps.metrics.get("step_s", 0.0),
        provider_trouble=leader.provider_trouble if leader is not None else "",
        pace=pace,
        unlearned=unlearned(config, controller.context.projector.glance.steps),
        run_dir=str(controller.run_dir),
        desired=dict(state.desired) or desired_workers(config),
    )


def headline(controller: Controller) -> str:
    """The limit of the run, or the cause for which it waits, in a sentence."""
    pace = _pace(controller)
    found = diagnose(evidence_of(controller))
    if pace is not None and found.at_work:
        return pace.sentence
    return f"{found.sentence[:1].upper()}{found.sentence[1:]}."


def _pace(controller: Controller) -> Bottleneck | None:
    """None before the first step; only the leader hears of slots, rewards and weights."""
    leader = controller.leader
    if leader is None or not controller.state.steps.metrics:
        return None
    return bottleneck_of(pace_of(leader))


def _worker(leader: Leader, worker: Worker, now: float) -> WorkerEvidence:
    key = (worker.worker_id, worker.incarnation)
    found = leader.liveness.prognosis(*key, now)
    session = leader.sessions.of(*key)
    report = session.report if session is not None else leader.last_reports.get(key)
    silent_s = found.silent_s if found is not None else 0.0
    return WorkerEvidence(
        worker.worker_id,
        worker.role,
        worker.host,
        worker.pid,
        _waits(report.waits, silent_s) if report is not None else (),
        worker.lifecycle,
        heard=report is not None,
        silent_s=silent_s,
        dead_in_s=found.dead_in_s if found is not None else math.inf,
        suspect=found.suspect if found is not None else False,
        still_s=found.still_s if found is not None else 0.0,
        wedged_in_s=found.wedged_in_s if found is not None else None,
        activity=report.activity if report is not None else "",
        mesh_epoch=report.mesh_epoch if report is not None else 0,
        loaded_version=worker.loaded_version,
        held=len(worker.held),
        spare=worker.spare,
        kernel=_local_kernel(worker.host, worker.pid) if silent_s > KERNEL_AFTER_S else None,
    )


def _waits(messages: Iterable[worker_pb2.Wait], older_s: float) -> tuple[Wait, ...]:
    found = (waits.from_message(message, older_s) for message in messages)
    return tuple(wait for wait in found if wait is not None)


def _leader(controller: Controller) -> str:
    """Who held the lease when this standby last looked."""
    if (holder := controller.lease_holder) is None:
        return ""
    return Culprit(CulpritKind.CONTROLLER, holder.controller_id, holder.host, holder.pid).words


def _local_kernel(host: str, pid: int) -> KernelState | None:
    return kernel_state(pid) if host == socket.gethostname() else None
