"""Read routes of the REST interface. A leader answers from its live ledger, a standby from its
copy."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import Response

from controller.diagnosis.collect import headline, why_of
from controller.export.group_content import GroupGone
from controller.replicated_controller import Controller
from controller.rest.data_flow import ages_in_flight, stalled_s, workers_by_pool
from controller.rest.schemas import Problem
from controller.status import controllers_of, status_head, status_of, time_left_s
from paceline.masking import Redactor
from paceline.observe.checkpoints import SavedCheckpoint
from paceline.observe.event_history import Key, position_key
from paceline.observe.groups import (
    MOST_STEP,
    Filter,
    Group,
    Groups,
    GroupSummary,
    StepNumber,
    WholeNumber,
    listed,
)
from paceline.observe.projection import Projection
from paceline.observe.run_files import finite
from paceline.rpc.grpc_channel import as_dict

EVENT_ID = r"^(\d{1,20}(-\d{1,20})?(/\d{1,9})?)?$"
CURVES = "reward_mean,loss"
LISTS = ("workers", "controllers", "spares", "changed")  # Parts of a StatusReply
SearchText = Annotated[
    str,
    Query(
        min_length=1,
        max_length=256,
        description="Only groups with this text in the prompt or in a completion, in any case. "
        "The sample archive is searched: a trained group is in it after a minute at most.",
    ),
]


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def parse_id(text: str) -> Key | None:
    """Key of an event id; None for the empty id, which is before all events. Raises Problem."""
    if not re.fullmatch(EVENT_ID, text):
        raise Problem(422, "since: this is not the id of an event")
    if not text:
        return None
    position, _, number = text.partition("/")
    # Without a number: after all events of that position.
    return position_key(position), int(number) if number else 1 << 62


def router(controller: Controller) -> APIRouter:
    routes = APIRouter(prefix="/api/v1")
    redactor = Redactor(controller.run_dir)
    projector = controller.context.projector
    reader = controller.groups

    async def answered(question: Callable[[Projection], Any]) -> Response:
        """The answer, computed and written as JSON in the projection's thread. Tests check its
        schema, not every request."""
        body = await projector.ask(lambda projection: dumps(question(projection)))
        return Response(body, media_type="application/json")

    @routes.get("/run", summary="State of the run", tags=["run"])
    async def run() -> dict[str, Any]:
        await projector.look()
        return run_of(controller, redactor)

    @routes.get("/workers", summary="All workers", tags=["fleet"])
    async def workers() -> list[dict[str, Any]]:
        return workers_of(controller, redactor)

    @routes.get("/steps", summary="Committed steps", tags=["learning"])
    async def steps(
        since: Annotated[
            WholeNumber, Query(ge=-1, le=MOST_STEP, description="After this step; -1: the newest")
        ] = -1,
        limit: Annotated[WholeNumber, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        """``next``: ``since`` of the next request."""

        def answer(run: Projection) -> dict[str, Any]:
            rows = run.metrics.rows(since, limit)
            return {"steps": rows, "next": rows[-1]["step"] if rows else max(since, 0)}

        return await answered(answer)

    @routes.get("/metrics", summary="Curves", tags=["learning"])
    async def metrics(
        names: Annotated[str, Query(max_length=4000, pattern=r"^[A-Za-z0-9_,.:/@+-]*$")] = CURVES,
        since: Annotated[
            WholeNumber, Query(ge=-1, le=MOST_STEP, description="Only steps after this one")
        ] = 0,
        until: StepNumber = MOST_STEP,
        points: Annotated[
            WholeNumber, Query(ge=2, le=5000, description="Points per curve, at most")
        ] = 500,
    ) -> Response:
        """Every list has as many values as ``x``, the steps; null if none was measured. If there
        are more steps than points, a value is the mean of a bucket of steps, and ``low`` and
        ``high`` are the bucket's extremes; otherwise these are empty. ``names``: all metrics."""
        asked = list(dict.fromkeys(n for n in names.split(",") if n))[:128]

        def answer(run: Projection) -> dict[str, Any]:
            found = run.metrics.curves(asked, since=since, until=until, points=points)
            evals = [e for e in run.evals if since <= e["step"] <= until]
            stride = -(-len(evals) // points) or 1
            return {**found, "evals": evals[::-1][::stride][::-1], "names": run.metrics.names}

        return await answered(answer)

    @routes.get("/groups", summary="Recent groups of samples", tags=["samples"])
    async def groups(
        chosen: Annotated[Filter, Depends()],
        limit: Annotated[WholeNumber, Query(ge=1, le=500)] = 50,
        sort: Literal["recent", "oldest", "reward", "-reward", "-length", "-staleness"] = "recent",
        reason: Annotated[
            str | None, Query(max_length=256, description="Only groups dropped for this reason")
        ] = None,
        grep: SearchText | None = None,
    ) -> Groups:
        if chosen.state != "dropped" and reason is None:
            found = await reader.matching(controller.state, chosen)
        else:
            recent = await projector.ask(lambda run: run.totals.dropped.for_reason(reason))
            named = (GroupSummary(**redactor.value(group)) for group in recent)
            found = [group for group in named if group.sequences or not chosen.by_content]
        if grep is not None:
            found = await reader.with_text(found, grep)
        return listed(found, chosen, sort, limit)

    @routes.get(
        "/groups/{group_id}",
        summary="One group, with prompt and completions",
        description="Tokens and log-probs are kept until a checkpoint covers the step; the sample "
        "archive keeps prompts and completions.",
        tags=["samples"],
        response_model=Group,
    )
    async def group(group_id: Annotated[str, Path(max_length=64)]) -> dict[str, Any]:
        try:
            return await reader.whole(controller.state, group_id)
        except GroupGone as gone:
            why = await projector.ask(lambda run: run.totals.dropped.reason_of(group_id))
            dropped = f"group {group_id} was dropped ({why}): its samples are deleted"
            raise Problem(404, str(gone) if why is None else dropped) from None

    @routes.get("/events", summary="Events", tags=["events"])
    async def events(
        since: Annotated[str, Query(max_length=64, description="Id of an event; empty: all")] = "",
        limit: Annotated[WholeNumber, Query(ge=1, le=2000)] = 200,
        kind: Annotated[
            Literal["all", "notable", "faults", "marks"],
            Query(description="notable: without commits; marks: those that curves are marked with"),
        ] = "all",
        since_step: Annotated[StepNumber, Query(description="Least number of committed steps")] = 0,
        until_step: StepNumber = MOST_STEP,
        newest: Annotated[
            bool | None,
            Query(description="The last ones instead of the first; default: only without since"),
        ] = None,
    ) -> Response:
        key = parse_id(since)
        # A client that pages on with the id of the last answer must not miss any.
        last = key is None if newest is None else newest

        def answer(run: Projection) -> dict[str, Any]:
            steps = (since_step, until_step)
            found = run.history.after(key, limit=limit, kinds=kind, newest=last, steps=steps)
            return {
                "events": [e.to_json() for e in found],
                "next": found[-1].id if found else since,
            }

        return await answered(answer)

    @routes.get("/timeline", summary="Swim lanes of the last minutes", tags=["fleet"])
    async def timeline(
        seconds: Annotated[float, Query(ge=1, le=3600, allow_inf_nan=False)] = 300,
        cells: Annotated[WholeNumber, Query(ge=10, le=2000, description="Of each lane")] = 300,
    ) -> Response:
        """Each lane has a letter for each part of the time."""
        now = controller.clock.time()
        return await answered(lambda run: redactor.value(run.lanes.window(now, seconds, cells)))

    @routes.get("/config", summary="Settings of the run", tags=["run"])
    async def config() -> dict[str, Any]:
        shown = controller.config.model_dump(mode="json")
        return {section: redactor.value(fields) for section, fields in shown.items()}

    @routes.get("/checkpoints", summary="Checkpoints on disk, newest first", tags=["run"])
    async def checkpoints() -> list[SavedCheckpoint]:
        keep = controller.settings.config.train.keep_checkpoints
        saved = await projector.ask(lambda run: run.checkpoints.kept(keep))
        return [replace(c, path=redactor.text(c.path)) for c in saved]

    @routes.get("/why", summary="What the run waits for, and because of whom", tags=["run"])
    async def why() -> dict[str, Any]:
        await projector.look()
        found = why_of(controller)
        return {**redactor.value(as_dict(found)), "since_s": round(found.since_s, 3)}

    @routes.get("/faults", summary="Faults so far: causes, hosts, time lost", tags=["run"])
    async def faults() -> dict[str, Any]:
        return await projector.ask(lambda run: run.totals.faults.report())

    return routes


def run_of(controller: Controller, redactor: Redactor) -> dict[str, Any]:
    """The status, and what else the ledger and this controller know of the run."""
    state, leader, head = controller.state, controller.leader, as_dict(status_head(controller))
    proposal = leader.proposal if leader is not None else None
    config = controller.settings.config
    # The ledger's rules are those in force; before the run begins there are only the settings.
    rules = state.run_spec if state.run_spec is not None else config.train
    return {
        **finite({name: value for name, value in head.items() if name not in LISTS}),
        "reason": redactor.text(head["reason"]),
        # The banner has the rest.
        "reward_trouble": controller.context.projector.glance.reward_trouble,
        "parity_failures": state.fleet.parity_failures,
        "rollbacks": state.versions.rollbacks,
        "samples_trained": state.steps.samples_trained,
        "tokens_trained": state.steps.tokens_trained,
        "max_staleness": rules.max_staleness,
        "late_groups": rules.late_groups,
        "max_token_age": rules.token_age,
        "groups_per_step": config.train.groups_per_step,
        "group_size": config.rollout.group_size,
        "staleness": ages_in_flight(state),
        "started_t": state.started_t or None,  # Unix seconds
        "ended_t": state.ended_t or None,
        "controllers": [
            # An address on this machine is the path of a socket.
            {**seen, "address": redactor.text(seen["address"])}
            for seen in controllers_of(controller)
        ],
        "served_by": controller.identity.controller_id,
        "bottleneck": redactor.text(headline(controller)),
        "time_left_s": time_left_s(controller),
        "stalled_s": stalled_s(controller),
        "proposed": proposal.desired if proposal is not None else {},
        "proposed_why": proposal.why if proposal is not None else "",
        "provider_trouble": redactor.text(leader.provider_trouble)[:500] if leader else "",
        "workers": workers_by_pool(state),
        "sinks": [
            {**sink, "trouble": redactor.text(sink["trouble"])[:500]}
            for sink in controller.sink_states()
        ],
        # Settings that are not what the run was started with, by dotted name.
        "changed": {name: asdict(change) for name, change in state.settings.changed.items()},
    }


def workers_of(controller: Controller, redactor: Redactor) -> list[dict[str, Any]]:
    return [
        as_dict(w)
        | {
            "heartbeat_age_s": round(w.heartbeat_age_s, 3),
            "activity": redactor.text(w.activity),
            "gauges": {k: v for k, v in sorted(w.gauges.items()) if math.isfinite(v)},
        }
        for w in sorted(status_of(controller).workers, key=lambda w: w.worker_id)
    ]
