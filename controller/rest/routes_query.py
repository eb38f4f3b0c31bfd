"""What can be asked. A leader answers from its live ledger, a standby from its copy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from controller.ledger import views
from controller.ledger.state import State
from controller.ledger.versions import Checkpoint
from controller.rest import samples, schemas
from controller.rest.data_flow import bottleneck, flow
from controller.rest.dropped_groups import DroppedGroups
from controller.rest.eta import StepRate
from controller.rest.event_history import Key
from controller.rest.problem_details import Problem, documented
from controller.rest.redaction import Redactor
from controller.rest.run_index import RunIndex
from controller.status import controllers_of, status_of
from paceline.run_view.run_file_writer import position_key
from paceline.v1 import common_pb2

if TYPE_CHECKING:
    from controller.replicated_controller import Controller

EVENT_ID = r"^(\d{1,20}(-\d{1,20})?(/\d{1,9})?)?$"
MOST_STEP = 1 << 53
ROLES = {common_pb2.ROLE_POLICY: "policy", common_pb2.ROLE_ROLLOUT: "rollout"}
CURVES = ("reward_mean", "loss")

StepNumber = Annotated[int, Query(ge=-1, le=MOST_STEP)]


class Json(Response):
    """A body that is JSON already: made where the data is, checked by tests and not per request."""

    media_type = "application/json"


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def parse_id(text: str) -> Key | None:
    """The key of an event id; None: from the beginning. Raises Problem."""
    if not re.fullmatch(EVENT_ID, text):
        raise Problem(422, "since: not the id of an event")
    if not text:
        return None
    position, _, number = text.partition("/")
    # Without a number: after everything of that position.
    return position_key(position), int(number) if number else 1 << 62


def router(controller: Controller, index: RunIndex, pace: StepRate) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", responses=documented(401, 403, 422, 429, 500))
    scrub = Redactor(controller.run_dir)
    drops = DroppedGroups(controller)

    async def told(question: Callable[[RunIndex], Any]) -> Json:
        """The answer, made and written as JSON in the index's thread."""
        return Json(await index.ask(lambda i: dumps(question(i))))

    @routes.get("/run", summary="The run at a glance", tags=["run"])
    async def run() -> schemas.Run:
        await pace.look()
        return schemas.Run(**run_of(controller, scrub, pace))

    @routes.get("/workers", summary="Every worker", tags=["fleet"])
    async def workers() -> list[schemas.Worker]:
        return [schemas.Worker(**w) for w in workers_of(controller, scrub)]

    @routes.get(
        "/workers/{worker_id}", summary="One worker", tags=["fleet"], responses=documented(404)
    )
    async def worker(worker_id: Annotated[str, Path(max_length=64)]) -> schemas.Worker:
        for found in workers_of(controller, scrub):
            if found["worker_id"] == worker_id:
                return schemas.Worker(**found)
        raise Problem(404, f"there is no worker {worker_id!r}")

    @routes.get(
        "/steps", summary="Committed steps", tags=["learning"], response_model=schemas.Steps
    )
    async def steps(
        since: Annotated[
            int, Query(ge=-1, le=MOST_STEP, description="After this step; -1: the newest")
        ] = -1,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        def answer(i: RunIndex) -> dict[str, Any]:
            rows = i.columns.rows(since, limit)
            return {"steps": rows, "next": rows[-1]["step"] if rows else max(since, 0)}

        return await told(answer)

    @routes.get("/metrics", summary="Curves", tags=["learning"], response_model=schemas.Series)
    async def metrics(
        names: Annotated[
            str,
            Query(max_length=2000, pattern=r"^[A-Za-z0-9_,]*$", examples=["reward_mean,loss"]),
        ] = ",".join(CURVES),
        since: Annotated[StepNumber, Query(description="Steps after this one")] = 0,
        until: Annotated[int, Query(ge=0, le=MOST_STEP)] = MOST_STEP,
        points: Annotated[int, Query(ge=2, le=5000, description="At most so many")] = 500,
    ) -> Response:
        wanted = list(dict.fromkeys(n for n in names.split(",") if n))[:64]

        def answer(i: RunIndex) -> dict[str, Any]:
            found = i.columns.curves(wanted, since=since, until=until, points=points)
            evals = [e for e in i.evals if since <= e["step"] <= until]
            stride = -(-len(evals) // points) or 1
            return {**found, "evals": evals[::-1][::stride][::-1], "names": i.columns.names}

        return await told(answer)

    @routes.get("/tasks", summary="Where the prompts are", tags=["flow"])
    async def tasks() -> schemas.TaskDetail:
        dropped = await index.ask(
            lambda i: [
                {"t": e.t, "detail": "", "attempt": 0, **_only(e.fields, schemas.DroppedTask)}
                for e in reversed(i.history.drops)
            ][:100]
        )
        book = controller.state.tasks
        failing = [
            {
                "task_id": task.task_id,
                "attempt": task.attempt,
                "failures": [scrub.text(f) for f in task.failures],
            }
            for task in list(book.records.values())
            if task.failures
        ][:100]
        counts = asdict(views.counts(controller.state))
        return schemas.TaskDetail.model_validate(
            {"counts": counts, "quarantined": dropped, "failing": failing}
        )

    @routes.get("/flow", summary="Who waits for whom", tags=["flow"])
    async def flow_now() -> schemas.Flow:
        await pace.look()
        return schemas.Flow(**flow(controller, pace.stalled_s))

    @routes.get("/groups", summary="Recent groups of samples", tags=["samples"])
    async def groups(
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
        sort: Literal["recent", "oldest", "reward", "-reward", "-length", "-staleness"] = "recent",
        stand: Literal["ready", "in_step", "trained", "dropped"] | None = None,
        reason: Annotated[
            str | None,
            Query(max_length=256, description="Dropped ones only, for this reason"),
        ] = None,
        step: Annotated[int | None, Query(ge=0, le=MOST_STEP)] = None,
        min_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
        max_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
        min_tokens: Annotated[int | None, Query(ge=0, le=MOST_STEP)] = None,
        max_tokens: Annotated[int | None, Query(ge=0, le=MOST_STEP)] = None,
    ) -> schemas.Groups:
        wanted = samples.Filter(stand, step, min_reward, max_reward, min_tokens, max_tokens)
        if stand == "dropped" or reason is not None:
            by_content = any(
                x is not None for x in (min_reward, max_reward, min_tokens, max_tokens)
            )
            found = [
                group
                for group in await drops.recent(reason)
                if wanted(group) and (group["sequences"] or not by_content)
            ]
            found.sort(key=samples.SORTS[sort])
            return schemas.Groups.model_validate({"groups": found[:limit], "total": len(found)})
        return schemas.Groups(**samples.groups(controller.state, wanted, sort, limit))

    @routes.get(
        "/groups/{group_id}",
        summary="One group, with prompt and completions",
        description="Only while its samples are kept: until a checkpoint covers their step.",
        tags=["samples"],
        responses=documented(404),
    )
    async def group(group_id: Annotated[str, Path(max_length=64)]) -> schemas.GroupDetail:
        try:
            return schemas.GroupDetail(**await samples.group(controller, group_id))
        except Problem:
            reason = await drops.reason_of(group_id)
            if reason is None:
                raise
            raise Problem(
                404, f"group {group_id} was dropped ({reason}): its samples are deleted"
            ) from None

    @routes.get("/events", summary="What happened", tags=["events"], response_model=schemas.Events)
    async def events(
        since: Annotated[str, Query(max_length=64, description="Id of an event; empty: all")] = "",
        limit: Annotated[int, Query(ge=1, le=2000)] = 200,
        kind: Annotated[
            Literal["all", "notable", "faults", "marks"],
            Query(description="notable: no commits; marks: what curves carry a mark for"),
        ] = "all",
        since_step: Annotated[
            int, Query(ge=0, le=MOST_STEP, description="With at least so many steps committed")
        ] = 0,
        until_step: Annotated[int, Query(ge=0, le=MOST_STEP)] = MOST_STEP,
        newest: Annotated[
            bool | None,
            Query(description="The last ones, not the first ones; not given: without since only"),
        ] = None,
    ) -> Response:
        key = parse_id(since)

        def answer(i: RunIndex) -> dict[str, Any]:
            steps = (since_step, until_step)
            # Who pages on with the id of the last answer must not be made to leap over any.
            last = key is None if newest is None else newest
            found = i.history.after(key, limit=limit, kinds=kind, newest=last, steps=steps)
            return {
                "events": [e.to_json() for e in found],
                "next": found[-1].id if found else since,
            }

        return await told(answer)

    @routes.get("/config", summary="The run's settings", tags=["run"])
    async def config() -> dict[str, Any]:
        shown = controller.config.model_dump(mode="json")
        return {section: scrub.value(fields) for section, fields in shown.items()}

    @routes.get("/versions", summary="Who holds which weights", tags=["fleet"])
    async def versions() -> list[schemas.VersionEpoch]:
        return [schemas.VersionEpoch(**line) for line in versions_of(controller)]

    @routes.get("/checkpoints", summary="What can be restored, newest first", tags=["run"])
    async def checkpoints() -> list[schemas.Checkpoint]:
        known = await index.ask(lambda i: dict(i.history.checkpoints))
        found = []
        for one in kept_checkpoints(controller.state, controller.config.train.keep_checkpoints):
            t, size = known.get((one.step, one.version), (0.0, 0))
            found.append(
                schemas.Checkpoint(
                    step=one.step,
                    version=one.version,
                    path=scrub.text(one.path),
                    size_bytes=size,
                    t=t,
                )
            )
        return found

    return routes


def run_of(controller: Controller, scrub: Redactor, pace: StepRate) -> dict[str, Any]:
    state = controller.state
    view = views.status(state)
    leader = controller.leader
    trouble = leader.trouble if leader is not None else controller.trouble
    found = asdict(view)
    return {
        **found,
        "run_id": controller.config.run.name,
        "run_name": controller.config.run.name,
        "phase": view.phase if state.ended or not trouble else trouble,
        "reason": scrub.text(view.reason),
        "total_steps": view.total_steps or controller.config.train.steps,
        "max_staleness": controller.config.train.max_staleness,
        "started_t": state.started_t,
        "ended_t": state.ended_t,
        "tasks": found["counts"],
        "controllers": list(controllers_of(controller)),
        "served_by": controller.identity.controller_id,
        "bottleneck": bottleneck(controller, pace.stalled_s),
        "time_left_s": pace.left_s,
        "stalled_s": round(pace.stalled_s, 3),
        **proposed_of(controller),
        "provider_trouble": provider_trouble_of(controller, scrub),
        "sinks": sinks_of(controller, scrub),
    }


def kept_checkpoints(state: State, keep: int) -> list[Checkpoint]:
    """Newest first. The ledger remembers more than the writer leaves on the disk."""
    return state.versions.checkpoints[-keep:][::-1]


def proposed_of(controller: Controller) -> dict[str, Any]:
    """Only the leader measures."""
    found = controller.leader.proposal if controller.leader is not None else None
    if found is None:
        return {"proposed": {}, "proposed_why": ""}
    return {"proposed": asdict(found.counts), "proposed_why": found.why}


def provider_trouble_of(controller: Controller, scrub: Redactor) -> str:
    leader = controller.leader
    return scrub.text(leader.provider_trouble)[:500] if leader is not None else ""


def sinks_of(controller: Controller, scrub: Redactor) -> list[dict[str, Any]]:
    feeds = controller.leader.sink_states() if controller.leader is not None else []
    return [
        {
            "name": feed.name,
            "written": feed.written,
            "failing": feed.failing,
            "trouble": scrub.text(feed.trouble)[:500],
        }
        for feed in feeds
    ]


def workers_of(controller: Controller, scrub: Redactor) -> list[dict[str, Any]]:
    return [
        {
            "worker_id": w.worker_id,
            "role": ROLES.get(w.role, "unknown"),
            "host": w.host,
            "pid": w.pid,
            # As text: a browser's numbers have 53 bits.
            "incarnation": str(w.incarnation),
            "state": w.state,
            "mesh_epoch": w.mesh_epoch,
            "version": w.version,
            "heartbeat_age_s": round(w.heartbeat_age_s, 3),
            "activity": scrub.text(w.activity),
            "held_leases": w.held_leases,
            "gauges": {k: v for k, v in sorted(w.gauges.items()) if v == v and abs(v) < 1e300},
        }
        for w in sorted(status_of(controller).workers, key=lambda w: w.worker_id)
    ]


def versions_of(controller: Controller) -> list[dict[str, Any]]:
    state = controller.state
    holders: dict[int, list[str]] = {state.versions.version: []}
    for worker in state.fleet.workers.values():
        held = max(worker.state_version, worker.loaded_version)
        if worker.alive and held >= 0:
            holders.setdefault(held, []).append(worker.worker_id)
    return [
        {"version": v, "step": state.versions.step_of(v), "workers": sorted(holders[v])}
        for v in sorted(holders, reverse=True)
    ]


def _only(fields: dict[str, Any], model: type[schemas.DroppedTask]) -> dict[str, Any]:
    return {k: v for k, v in fields.items() if k in model.model_fields}
