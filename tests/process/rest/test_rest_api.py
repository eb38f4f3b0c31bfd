"""The REST interface of real controllers: what it says is what the ledger holds."""

import json
import re
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.observe.checkpoints import Checkpoints
from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import addresses, control_of, status, until
from tests.fixtures.rest import DULL, HTML, bearer, rest_url

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
async def leader(served: Controllers) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=rest_url(served), timeout=60) as client:
        await until(lambda: _ready(client))
        yield client


@pytest.fixture
async def standby(served: Controllers) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=rest_url(served, 1), timeout=60) as client:
        await until(lambda: _ready(client))
        yield client


async def _ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200


async def get(client: httpx.AsyncClient, path: str) -> Any:
    answer = await client.get(f"/api/v1/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def shows(client: httpx.AsyncClient, path: str, check: Callable[[Any], object]) -> None:
    """Returns once the answer is so."""

    async def holds() -> bool:
        return bool(check(await get(client, path)))

    await until(holds)


def events_of(kind: str) -> Callable[[Any], int]:
    return lambda answer: sum(event["type"] == kind for event in answer["events"])


def assert_problem(answer: httpx.Response, status_code: int, *words: str) -> None:
    assert answer.status_code == status_code, answer.text
    assert answer.headers["content-type"].startswith("application/problem+json")
    problem = answer.json()
    assert problem["status"] == status_code and problem["detail"]
    # Phrases of RFC 9110, for which Python 3.11 has older ones.
    newer = {413: "Content Too Large", 422: "Unprocessable Content"}
    assert problem["title"] == newer.get(status_code, HTTPStatus(status_code).phrase)
    assert "Traceback" not in answer.text
    for word in words:
        assert word in problem["detail"]


async def test_leader_and_standby_say_what_the_ledger_holds(
    served: Controllers, leader: httpx.AsyncClient, standby: httpx.AsyncClient
) -> None:
    control = control_of(served, addresses(served)[:1])
    truth = await status(control)
    await control.close()
    for client, name in ((leader, "controller-0"), (standby, "controller-1")):
        await shows(client, "run", lambda run: run["step"] == truth.step)
        run = await get(client, "run")
        assert run["served_by"] == name and run["leader"] == "controller-0"
        for field in ("step", "version", "term", "total_steps", "failovers", "mesh_epoch"):
            assert run[field] == getattr(truth, field), field
        for state in ("pending", "leased", "ready", "in_step", "trained"):
            assert run["tasks"][state] == getattr(truth.tasks, state), state
        assert run["metrics"] == pytest.approx(dict(truth.metrics))
        workers = await get(client, "workers")
        assert {w["worker_id"]: w["version"] for w in workers} == {
            w.worker_id: w.version for w in truth.workers
        }
        one = next(w for w in workers if w["worker_id"] == "policy-0")
        assert one["role"] == "policy" and one["pid"] > 0
        assert sum(run["staleness"].values()) == truth.tasks.ready + truth.tasks.in_step
        ages = [share for name, share in run["metrics"].items() if name.startswith("token_age_")]
        assert sum(ages) == pytest.approx(1.0) and run["late_groups"] == "train"
        assert run["max_token_age"] >= 8
        assert run["bottleneck"] != ""
        # The run stands still by now, and says for how long and what for.
        if run["stalled_s"]:
            assert any(word in run["bottleneck"] for word in ("waits", "takes", "is led by"))
        assert 0 < run["time_left_s"] < truth.total_steps * 60


async def test_completions_are_handed_out_as_they_were_written(leader: httpx.AsyncClient) -> None:
    listed = await get(leader, "groups?limit=3&sort=oldest")
    assert len(listed["groups"]) == 3 and listed["total"] > 3
    group = await get(leader, f"groups/{listed['groups'][0]['group_id']}")
    assert HTML in group["prompt"]
    assert [c["text"] for c in group["completions"]] == [f"{n} {HTML}" for n in range(4)]
    assert len(group["completions"][0]["tokens"]) == 16
    assert group["completions"][1]["reward_components"] == {"exact_match": 1.0}
    assert group["completions"][1]["relative_reward"] == pytest.approx(1.0)
    answer = await leader.get(f"/api/v1/groups/{group['group_id']}")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    only = await get(leader, "groups?state=trained&min_reward=0.4&max_reward=0.6&limit=500")
    assert only["groups"] and all(g["state"] == "trained" for g in only["groups"])
    assert (await get(leader, "groups?min_reward=0.9"))["total"] == 0
    assert (await get(leader, "groups?step=1"))["total"] == 4


async def test_dropped_groups_are_shown_with_their_reason(
    leader: httpx.AsyncClient, standby: httpx.AsyncClient
) -> None:
    counted = (await get(leader, "run"))["tasks"]["dropped"]
    assert counted == {"uninformative": counted["uninformative"]}
    count = min(counted["uninformative"], 200)
    for client in (leader, standby):
        await shows(client, "groups?state=dropped", lambda found: found["total"] == count)
    found = await get(leader, "groups?state=dropped&reason=uninformative&sort=oldest&limit=500")
    assert [int(g["group_id"][1:]) % 7 for g in found["groups"]] == [DULL] * found["total"]
    first = found["groups"][0]
    assert (first["reason"], first["state"]) == ("uninformative", "dropped")
    assert first["detail"] == "all rewards are equal"
    assert (await get(leader, "groups?reason=stale"))["total"] == 0
    assert (await get(leader, "groups?state=dropped&max_reward=0.9"))["total"] == 0
    gone = await leader.get(f"/api/v1/groups/{first['group_id']}")
    assert_problem(gone, 404, "dropped (uninformative)")


async def test_settings_are_shown_without_paths_of_the_machine(
    served: Controllers, leader: httpx.AsyncClient
) -> None:
    for path in ("config", "events", "checkpoints", "run"):
        text = (await leader.get(f"/api/v1/{path}")).text
        assert str(served.directory) not in text, path
    config = await get(leader, "config")
    assert config["data"]["path"] == "…/rows.jsonl" and config["train"]["groups_per_step"] == 4


async def test_a_standby_sends_writes_to_the_leader(
    served: Controllers, leader: httpx.AsyncClient, standby: httpx.AsyncClient
) -> None:
    headers = bearer(served)
    body = {"desired": {"rollout": 3}, "request_id": "once"}
    sent = await standby.post("/api/v1/scale", json=body, headers=headers)
    assert sent.status_code == 307
    assert sent.headers["location"] == rest_url(served) + "/api/v1/scale"
    for _ in range(2):
        done = await leader.post("/api/v1/scale", json=body, headers=headers)
        message = done.json()["message"]
        assert message.startswith("desired counts are now policy=1, rollout=3; nobody starts or")
    assert (await get(leader, "run"))["desired"] == {"policy": 1, "rollout": 3}
    notable = "events?kind=notable&limit=1000"
    await shows(leader, notable, events_of("Scaled"))
    # Run files are written in order: had there been a second one, it would stand before this.
    await leader.post("/api/v1/pause", headers=headers)
    await leader.post("/api/v1/resume", headers=headers)
    await shows(leader, notable, lambda found: events_of("Paused")(found) >= 2)
    assert events_of("Scaled")(await get(leader, notable)) == 1
    # Nothing of it happens without the token, on either.
    assert_problem(
        await standby.post("/api/v1/scale", json={"desired": {"rollout": 9}}), 401, "token"
    )
    assert (await get(leader, "run"))["desired"]["rollout"] == 3


async def test_what_a_stale_page_sends_drains_no_other_process(
    served: Controllers, leader: httpx.AsyncClient
) -> None:
    """Nor a number: test_dashboard, a_page_that_is_behind_changes_only_what_was_typed."""
    headers = bearer(served)
    workers = {w["worker_id"]: w for w in await get(leader, "workers")}
    incarnation = workers["rollout-0"]["incarnation"]
    body = {"worker_id": "rollout-0", "incarnation": str(int(incarnation) + 1)}
    replaced = await leader.post("/api/v1/drain", json=body, headers=headers)
    assert_problem(replaced, 409, "rollout-0 is another process now")


async def test_pause_resume_and_checkpoint(served: Controllers, leader: httpx.AsyncClient) -> None:
    headers = bearer(served)
    assert (await leader.post("/api/v1/pause", headers=headers)).status_code == 200
    assert (await get(leader, "run"))["phase"] == "paused"
    assert "paus" in (await get(leader, "run"))["bottleneck"]
    assert (await leader.post("/api/v1/resume", headers=headers)).status_code == 200
    assert (await get(leader, "run"))["phase"] != "paused"
    asked = await leader.post("/api/v1/checkpoint", json={"request_id": "c"}, headers=headers)
    step = (await get(leader, "run"))["step"]
    assert asked.json()["message"].startswith(f"a checkpoint will be written after step {step + 1}")
    again = await leader.post("/api/v1/checkpoint", json={"request_id": "c"}, headers=headers)
    assert again.json() == asked.json()


async def test_settings_change_and_are_shown_and_marked(
    served: Controllers, leader: httpx.AsyncClient
) -> None:
    headers = bearer(served)
    body = {"settings": {"train.optimizer.lr": 5e-7}, "request_id": "set-1"}
    dry = await leader.post("/api/v1/settings", json={**body, "dry_run": True}, headers=headers)
    assert json.loads(dry.json()["changes"][0]["new"]) == 5e-7
    assert (await get(leader, "run"))["changed"] == {}
    done = await leader.post("/api/v1/settings", json=body, headers=headers)
    assert done.status_code == 200 and "train.optimizer.lr" in done.json()["message"]
    again = await leader.post("/api/v1/settings", json=body, headers=headers)
    assert again.json()["message"] == done.json()["message"]
    change = (await get(leader, "run"))["changed"]["train.optimizer.lr"]
    assert (change["old"], change["new"]) == (1e-6, 5e-7)
    await shows(leader, "events?kind=marks&limit=600", events_of("SettingsChanged"))
    fixed = {"settings": {"rollout.temperature": 0.5}}
    refused = await leader.post("/api/v1/settings", json=fixed, headers=headers)
    assert_problem(refused, 422, "--from CHECKPOINT")
    for name, said in (("", "an empty name"), ("train.lrr", "Did you mean train.optimizer.lr?")):
        refused = await leader.post(
            "/api/v1/settings", json={"settings": {name: 1}}, headers=headers
        )
        assert_problem(refused, 422, said)


async def test_who_pages_through_events_leaps_over_none(leader: httpx.AsyncClient) -> None:
    everything = (await get(leader, "events?limit=2000"))["events"]
    assert len(everything) > 12
    assert (await get(leader, "events?limit=5"))["events"] == everything[-5:], "the newest"
    read, since = everything[:1], everything[0]["id"]
    while page := await get(leader, f"events?limit=5&since={since}"):
        if not page["events"]:
            break
        read, since = read + page["events"], page["next"]
    assert [e["id"] for e in read[: len(everything)]] == [e["id"] for e in everything]


def test_only_checkpoints_that_are_left_can_be_restored() -> None:
    checkpoints = Checkpoints()
    for n in (1, 2, 3):
        saved = {"step": n, "path": f"checkpoints/step-{n}", "t": 1.0}
        checkpoints.take("CheckpointRecorded", saved)
    assert [c.step for c in checkpoints.kept(2)] == [3, 2]
    assert [c.step for c in checkpoints.kept(9)] == [3, 2, 1]
    best = {"step": 1, "path": "checkpoints/step-1", "reward_mean": 0.5}
    checkpoints.take("BestCheckpointChosen", best)
    assert [(c.step, c.best) for c in checkpoints.kept(1)] == [(3, False), (1, True)]


async def test_what_can_be_read_can_be_asked_for_its_headers_alone(
    leader: httpx.AsyncClient,
) -> None:
    """Load balancers probe so."""
    for path in ("/healthz", "/readyz", "/", "/api/v1/run", "/metrics"):
        answer = await leader.head(path)
        assert answer.status_code == 200, path
        assert answer.content == b"" and int(answer.headers["content-length"]) > 0, path
    assert (await leader.head("/api/v1/nothing")).status_code == 404
    assert (await leader.get("/healthz")).json() == {"status": "alive"}, "the connection is whole"


async def test_every_refusal_is_problem_details(
    served: Controllers, leader: httpx.AsyncClient
) -> None:
    headers = bearer(served)
    assert_problem(await leader.get("/nothing"), 404)
    assert_problem(await leader.get("/static/../app.py"), 404)
    assert_problem(await leader.get("/api/v1/groups/t99999999"), 404, "no group")
    assert_problem(await leader.delete("/api/v1/run", headers=headers), 405)
    # Other values that the description does not allow: test_rest_fuzz.
    assert_problem(await leader.get("/api/v1/groups?min_reward=nan"), 422, "min_reward")
    assert_problem(await leader.get("/api/v1/events?since=x"), 422, "since")
    assert_problem(await leader.post("/api/v1/scale", json={}, headers=headers), 422)
    assert_problem(await leader.post("/api/v1/scale", content=b"{", headers=headers), 422)
    as_form = {**headers, "Content-Type": "application/x-www-form-urlencoded"}
    sent = await leader.post("/api/v1/scale", content=b'{"desired": {}}', headers=as_form)
    assert_problem(sent, 422, "Content-Type is application/json")
    for body, code in (({"worker_id": "nobody"}, 404), ({"worker_id": "?"}, 422), ({"x": 1}, 422)):
        assert_problem(await leader.post("/api/v1/drain", json=body, headers=headers), code)
    assert_problem(await leader.post("/api/v1/stop", content=b"x" * 70_000, headers=headers), 413)


async def test_prometheus_metrics_have_standard_names_and_the_ledgers_values(
    leader: httpx.AsyncClient,
) -> None:
    answer = await leader.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {f.name: f for f in text_string_to_metric_families(answer.text)}
    run = await get(leader, "run")
    values = {name: f.samples[0].value for name, f in families.items() if f.samples}
    assert values["paceline_step"] == run["step"] and values["paceline_leader"] == 1
    assert values["paceline_samples_trained"] == run["samples_trained"]
    newest = (await get(leader, "steps?limit=1"))["steps"][-1]
    assert values["paceline_last_commit_time_seconds"] == newest["t"]
    states = {s.labels["state"]: s.value for s in families["paceline_tasks"].samples}
    assert states["trained"] == run["tasks"]["trained"]
    for name, family in families.items():
        assert name.startswith(("paceline_", "process_")), name
        assert family.documentation and not name.endswith(("_ms", "_s", "_mb"))
        if family.type == "counter":
            assert all(s.name.endswith("_total") for s in family.samples), name


DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "paceline.json"


async def test_the_grafana_dashboard_asks_for_what_there_is(leader: httpx.AsyncClient) -> None:
    families = list(text_string_to_metric_families((await leader.get("/metrics")).text))
    known = {s.name for f in families for s in f.samples}
    # A family without a value yet: nothing has a GPU here.
    suffix = {"counter": "_total", "histogram": "_bucket"}
    known |= {f.name + suffix.get(f.type, "") for f in families}
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    asked += [annotation["expr"] for annotation in board["annotations"]["list"]]
    names = {name for expr in asked for name in re.findall(r"\b(?:paceline|process)_\w+", expr)}
    assert len(asked) > 40 and names <= known, sorted(names - known)
    # And it shows what there is: a new metric has a place on it, or is named here.
    left_out = {"paceline_start_time_seconds", "paceline_worker_weights_version"}
    exported = {n for n in known if n.startswith("paceline_")} - left_out
    assert exported - names == set()
    labels = {s.name: set(s.labels) for f in families for s in f.samples}
    for expr in asked:
        for label, name in re.findall(r"by \((\w+)\) \(+(?:rate\()?(paceline_\w+)", expr):
            assert label in labels.get(name, {label}), expr


async def test_a_drained_worker_is_replaced_where_that_is_asked_for(
    served: Controllers, leader: httpx.AsyncClient, standby: httpx.AsyncClient
) -> None:
    headers = bearer(served)
    counts = {"policy": 2, "rollout": 3}
    await leader.post("/api/v1/scale", json={"desired": counts}, headers=headers)
    body = {"worker_id": "rollout-0", "replace": True, "request_id": "instead"}
    for _ in range(2):
        done = await leader.post("/api/v1/drain", json=body, headers=headers)
        assert done.status_code == 200, done.text
    assert (await get(leader, "run"))["desired"] == {"policy": 2, "rollout": 3}
    await shows(
        leader,
        "events?kind=notable",
        lambda found: "rollout-0 is asked to leave" in [e["text"] for e in found["events"]],
    )
    await shows(
        standby,
        "workers",
        lambda found: ("rollout-0", "draining") in [(w["worker_id"], w["state"]) for w in found],
    )
    done = await leader.post("/api/v1/drain", json={"worker_id": "policy-0"}, headers=headers)
    assert done.status_code == 200, done.text
    assert (await get(leader, "run"))["desired"] == {"policy": 1, "rollout": 3}
    wrong = await leader.post("/api/v1/drain", json={"replace": "x"}, headers=headers)
    assert_problem(wrong, 422, "replace")
