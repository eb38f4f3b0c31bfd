"""The dashboard in a real browser, against real controllers."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.v1 import rollout_pb2
from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import addresses, config_of, running_controllers
from testbed.workers.fake_workers import FakeRollout, make_group
from tests.fixtures.rest import HTML, bearer, rest_url, train

TABS = ("learning", "flow", "timeline", "fleet", "samples", "events", "settings")
VISIBLE = "return document.getElementById(arguments[0]).textContent"


FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb"),
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A selenium driver of headless Chromium; without one the tests are skipped."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("chromium")
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1440,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        started.set_script_timeout(20)
        yield started
    finally:
        started.quit()


def errors_of(page: Any, *, of_status: int = 0) -> list[str]:
    """The page's errors since the last call: failed scripts, policy violations.

    ``of_status``: an HTTP status that the test provoked; its errors are left out.
    """
    lines = [entry["message"] for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    provoked = f"a status of {of_status} "
    return [line for line in lines if "net::ERR_" not in line and provoked not in line]


def wait(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    async def held() -> Any:
        async with asyncio.timeout(timeout_s):
            while True:
                if found := condition():
                    return found
                await asyncio.sleep(0.05)

    try:
        return asyncio.run(held())
    except TimeoutError:
        raise AssertionError(what) from None


def text(page: Any, element_id: str) -> str:
    return str(page.execute_script(VISIBLE, element_id))


def open_page(page: Any, url: str, tab: str) -> None:
    page.get("about:blank")
    page.get(f"{url}/#/{tab}")
    wait(lambda: "answered by" in text(page, "link"), "the page shows no answer")


def fill(page: Any, element_id: str, value: object) -> None:
    script = (
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('input'))"
    )
    page.execute_script(script, element_id, str(value))


def click(page: Any, selector: str) -> None:
    page.execute_script("document.querySelector(arguments[0]).click()", selector)


def wait_for_dialog(page: Any) -> None:
    is_open = "return document.getElementById('dialog').open"
    wait(lambda: page.execute_script(is_open), "no dialog")


def api(url: str, path: str) -> Any:
    return httpx.get(f"{url}/api/v1/{path}", timeout=60).json()


def rows_of(page: Any, table: str) -> list[list[str]]:
    script = (
        "return [...document.querySelectorAll(arguments[0] + ' tbody:not([aria-hidden]) tr')]"
        ".map(tr => [...tr.cells].map(c => c.textContent))"
    )
    found: list[list[str]] = page.execute_script(script, f"#{table}")
    return found


def test_values_on_the_page_are_those_of_the_interface(served: Controllers, page: Any) -> None:
    url = rest_url(served)
    open_page(page, url, "learning")
    run = api(url, "run")
    assert text(page, "run-name") == run["run_name"] == "load"
    assert text(page, "v-step") == f"{run['step']} / {run['total_steps']:,}"
    assert text(page, "v-reward") == f"{run['metrics']['reward_mean']:.3f}"
    wait(lambda: rows_of(page, "steps-table"), "no table of steps")
    steps = api(url, "steps?limit=20")["steps"]
    shown = [int(row[0]) for row in rows_of(page, "steps-table")]
    assert shown == [row["step"] for row in reversed(steps)]
    # A curve is a picture with words for those who do not see it.
    label = "return document.querySelector('.chart canvas').getAttribute('aria-label')"
    wait(lambda: "at step" in (page.execute_script(label) or ""), "the curve has no description")
    assert f"at step {steps[-1]['step']}" in page.execute_script(label)

    open_page(page, url, "flow")
    flow = api(url, "run")

    def without_times(sentence: str) -> str:
        return re.sub(r"\d+(\.\d+)? (s|min)", "", sentence)

    expected = without_times(flow["bottleneck"])
    wait(lambda: without_times(text(page, "bottleneck")) == expected, "another sentence")
    assert f"{flow['tasks']['trained']} trained" in text(page, "pipeline-text")

    open_page(page, url, "fleet")
    workers = api(url, "workers")
    wait(lambda: len(rows_of(page, "workers-table")) == len(workers), "workers are missing")
    assert [r[0] for r in rows_of(page, "workers-table")] == [w["worker_id"] for w in workers]
    assert [r[6] for r in rows_of(page, "workers-table")] == [
        str(w["version"]) if w["version"] >= 0 else "–" for w in workers
    ]
    run = api(url, "run")
    alive = sum(min(run["workers"].get(p, 0), count) for p, count in run["desired"].items())
    assert text(page, "v-workers") == f"{alive} of {sum(run['desired'].values())}"
    # The workers of the fixture have ended without a word: the banner says whom the run waits for.
    found = api(url, "why")
    assert found["severity"] != "ok" and found["culprit"]["name"]
    wait(lambda: found["culprit"]["name"] in text(page, "why"), "no banner")
    assert found["remedy"] in text(page, "why")
    assert errors_of(page) == []


def test_markup_in_a_completion_stays_text(served: Controllers, page: Any) -> None:
    open_page(page, rest_url(served), "samples")
    wait(lambda: rows_of(page, "groups-table"), "no groups")
    click(page, "#groups-table .link")
    wait(lambda: HTML in text(page, "group"), "the group's text is not shown as it is")
    assert "A token is not a character here" in text(page, "group")
    assert page.execute_script("return document.querySelectorAll('#group img, script').length") == 1
    assert "owned" not in page.title
    assert errors_of(page) == []


def test_without_a_right_token_nothing_changes_and_with_it_scale_takes_effect(
    served: Controllers, page: Any
) -> None:
    url = rest_url(served)
    open_page(page, url, "fleet")
    wanted = api(url, "run")["desired"]
    wait(lambda: page.execute_script("return document.getElementById('scale-rollout').value"), "-")
    fill(page, "scale-policy", wanted["policy"])
    fill(page, "scale-rollout", 7)
    click(page, "#scale-form button")
    wait_for_dialog(page)
    assert f"{wanted['rollout']} → 7" in text(page, "dialog-text")
    fill(page, "token", "wrong-" * 4)
    click(page, "#dialog-yes")
    wait(lambda: "token is wrong" in text(page, "dialog-error"), "no word of the wrong token")
    assert api(url, "run")["desired"] == wanted
    token = bearer(served)["Authorization"].split()[1]
    fill(page, "token", token)
    click(page, "#dialog-yes")
    wait(lambda: api(url, "run")["desired"]["rollout"] == 7, "the scale had no effect")
    stored = "return [JSON.stringify(localStorage), document.cookie, location.href].join()"
    assert token not in page.execute_script(stored)


def give_token(page: Any, token: str) -> None:
    """As if it had been typed."""
    page.execute_async_script(
        "const [token, done] = arguments;"
        "import('/static/api.js').then((api) => { api.storeToken(token); done(); });",
        token,
    )


def test_a_page_that_is_behind_changes_only_what_was_typed(served: Controllers, page: Any) -> None:
    url, headers = rest_url(served), bearer(served)
    errors_of(page)
    open_page(page, url, "fleet")
    token = headers["Authorization"].split()[1]
    give_token(page, token)
    before = api(url, "run")["desired"]
    wait(lambda: page.execute_script("return document.getElementById('scale-policy').value"), "-")
    fill(page, "scale-rollout", before["rollout"] + 1)
    scale = {"policy": before["policy"] + 1}
    assert (
        httpx.post(f"{url}/api/v1/scale", json={"desired": scale}, headers=headers).status_code
        == 200
    )
    click(page, "#scale-form button")
    wait_for_dialog(page)
    assert "Policy" not in text(page, "dialog-text")
    # Meanwhile someone else changes the same number: what is confirmed is no longer so.
    other = {"rollout": before["rollout"] + 2}
    assert (
        httpx.post(f"{url}/api/v1/scale", json={"desired": other}, headers=headers).status_code
        == 200
    )
    click(page, "#dialog-yes")
    expected = {"rollout": before["rollout"]}
    stale = {"desired": {"rollout": before["rollout"] + 1}, "expected": expected}
    refused = httpx.post(f"{url}/api/v1/scale", json=stale, headers=headers)
    assert refused.status_code == 409
    detail = refused.json()["detail"]
    wait(lambda: text(page, "dialog-error") == detail, "the stale number was taken")
    assert api(url, "run")["desired"] == {**scale, **other}
    click(page, "#dialog-no")
    httpx.post(f"{url}/api/v1/scale", json={"desired": before}, headers=headers)
    assert errors_of(page, of_status=409) == []


def test_a_token_in_the_address_is_taken_out_of_it_and_steers(
    served: Controllers, page: Any
) -> None:
    page.get("about:blank")
    page.get(f"{rest_url(served)}/#token={bearer(served)['Authorization'].split()[1]}")
    wait(lambda: "answered by" in text(page, "link"), "the page shows no answer")
    assert "token" not in page.current_url
    click(page, "#do-checkpoint")
    hidden = "return document.getElementById('token-label').hidden"
    assert page.execute_script(hidden), "the page asks for a token that it has"
    click(page, "#dialog-no")


def test_the_timeline_has_a_lane_for_each_process_and_words_for_it(
    served: Controllers, page: Any
) -> None:
    url = rest_url(served)
    errors_of(page)
    open_page(page, url, "timeline")
    fill(page, "lanes-span", 900)
    wait(lambda: rows_of(page, "lanes-table"), "no lanes")
    lanes = api(url, "timeline?seconds=900")["lanes"]
    assert {"policy-0", "rollout-0"} <= {lane["name"] for lane in lanes}
    assert [row[0] for row in rows_of(page, "lanes-table")] == [lane["name"] for lane in lanes]
    label = "return document.getElementById('lanes').getAttribute('aria-label')"
    assert f"{len(lanes)} lanes" in page.execute_script(label)
    assert "trained" in text(page, "lanes-use")
    assert errors_of(page) == []


def test_every_view_is_reached_by_keyboard_and_has_a_name(served: Controllers, page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(page, rest_url(served), "learning")
    page.execute_script("document.getElementById('tab-learning').focus()")
    for name in (*TABS[1:], TABS[0]):
        page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
        assert page.switch_to.active_element.get_attribute("id") == f"tab-{name}"
        assert page.execute_script("return !document.getElementById(arguments[0]).hidden", name)
    unnamed = page.execute_script(
        "return [...document.querySelectorAll('button, input, select')].filter(e =>"
        " !(e.textContent.trim() || e.getAttribute('aria-label') || e.closest('label')))"
        ".map(e => e.outerHTML)"
    )
    assert unnamed == []
    headless = page.execute_script(
        "return [...document.querySelectorAll('table')].filter(t =>"
        " !t.caption || !t.querySelector('thead th[scope=col]')).length"
    )
    assert headless == 0


def test_nothing_is_wider_than_a_phone(served: Controllers, page: Any) -> None:
    url = rest_url(served)
    errors_of(page)
    phone = {"width": 320, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        for tab in TABS:
            open_page(page, url, tab)
            if tab == "samples":
                wait(lambda: rows_of(page, "groups-table"), "no groups")
                click(page, "#groups-table .link")
                wait(lambda: HTML in text(page, "group"), "no group")
            width = page.execute_script("return document.documentElement.scrollWidth")
            assert width <= 320, tab
            cut = page.execute_script(
                "const at = (id) => document.getElementById(id).getBoundingClientRect();"
                "return at('tabs').bottom > at('link').top + 1"
            )
            assert not cut, "the views share their line with what else there is to say"
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert errors_of(page) == []


def test_a_leader_killed_while_the_page_is_open_leaves_it_working(
    tmp_path: Path, page: Any
) -> None:
    with running_controllers(tmp_path, 2, fleet={"lease_ttl_s": 60.0}) as controllers:
        asyncio.run(train(controllers, 3))
        first, second = rest_url(controllers), rest_url(controllers, 1)
        wait(lambda: api(second, "run")["step"] >= 3, "the standby does not follow")
        # What only the leader knows, a page of the standby asks there.
        open_page(page, second, "fleet")
        heard = "".join(str(w["heartbeat_age_s"]) for w in api(second, "workers"))
        assert heard.count("-1") == 2
        wait(
            lambda: [r[4] != "–" for r in rows_of(page, "workers-table")] == [True, True],
            "a standby's page shows no heartbeats",
        )
        open_page(page, first, "fleet")
        wait(lambda: len(rows_of(page, "controllers-table")) == 2, "the standby is not shown")
        wait(lambda: "1 other in reach" in text(page, "link"), "the standby is not in reach")
        controllers.started[0].kill()
        wait(lambda: text(page, "link").startswith("answered by controller-1"), "the page is stuck")
        wait(lambda: text(page, "v-leader").startswith("controller-1"), "no new leader is shown")
        assert text(page, "v-step").split(" ")[0] == str(api(second, "run")["step"])
        # Steering goes to the new leader, from the page of the dead one.
        token = bearer(controllers)["Authorization"].split()[1]
        give_token(page, token)
        click(page, "#do-pause")
        wait_for_dialog(page)
        click(page, "#dialog-yes")
        wait(lambda: api(second, "run")["phase"] == "paused", "the pause had no effect")
        wait(lambda: text(page, "phase") == "paused", "the page does not show the pause")


def test_a_page_that_needs_the_token_to_read_asks_for_it_once(tmp_path: Path, page: Any) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 2 + "\n")
    auth, rest = {"token_file": str(token)}, {"host": "0.0.0.0"}
    is_open = "return document.getElementById('dialog').open"
    asked = (
        "return performance.getEntriesByType('resource')"
        ".filter(e => e.name.endsWith('/api/v1/run')).length"
    )
    errors_of(page)
    with running_controllers(tmp_path, 1, auth=auth, rest=rest) as controllers:
        port = rest_url(controllers).rpartition(":")[2]
        url = f"http://127.0.0.1:{port}"
        page.get(url)
        wait_for_dialog(page)
        click(page, "#dialog-no")
        before = page.execute_script(asked)
        wait(lambda: page.execute_script(asked) >= before + 2, "the page asks no more")
        assert not page.execute_script(is_open), "it asks again right after Cancel"
        page.get("about:blank")
        page.get(url)
        wait_for_dialog(page)
        fill(page, "token", token.read_text().strip())
        click(page, "#dialog-yes")
        wait(lambda: "answered by" in text(page, "link"), "the token is not used")
        # The page that is loaded next may be that of another process: nothing is kept for it.
        page.refresh()
        wait_for_dialog(page)
        kept = "return Object.keys(sessionStorage).concat(Object.keys(localStorage)).join()"
        assert "token" not in page.execute_script(kept)
        assert errors_of(page, of_status=401) == []


async def _register(controllers: Controllers, count: int) -> None:
    config, where = config_of(controllers), addresses(controllers)
    workers = [FakeRollout(config, where, f"rollout-{i:04}") for i in range(count)]
    for first in range(0, count, 50):
        await asyncio.gather(*(w.session.register() for w in workers[first : first + 50]))
    for worker in workers:
        await worker.control.close()


def write_long_run(directory: Path, steps: int) -> None:
    """The file of a long run."""
    names = "reward_mean", "loss", "kl", "entropy", "grad_norm", "clip_fraction", "tokens_per_s"
    with (directory / "events.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            event = {
                "position": f"{1000 + step}-0",
                "n": 1,
                "t": 1000.0 + step,
                "type": "StepCommitted",
                "step": step,
                "version": step,
                "metrics": dict.fromkeys(names, step / steps),
            }
            file.write(json.dumps(event, separators=(",", ":")) + "\n")


def test_a_thousand_workers_and_a_hundred_thousand_steps_stay_smooth(
    tmp_path: Path, page: Any
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_long_run(run_dir, 100_000)
    with running_controllers(tmp_path, 1, fleet={"lease_ttl_s": 120.0}) as controllers:
        assert controllers.run_dir == run_dir
        asyncio.run(_register(controllers, 1000))
        url = rest_url(controllers)
        open_page(page, url, "learning")
        assert len(api(url, "workers")) == 1000
        wait(lambda: api(url, "steps?limit=1")["next"] == 100_000, "the steps are not read", 40)
        wait(lambda: len(rows_of(page, "steps-table")) == 20, "no curves", 40)
        for tab, ready in (
            ("fleet", lambda: text(page, "workers-count") == "1,000 up"),
            ("learning", lambda: len(rows_of(page, "steps-table")) == 20),
        ):
            page.execute_script(f"document.getElementById('tab-{tab}').click()")
            wait(ready, f"{tab} is not shown")
            share = _busy_share(page)
            print(f"{tab}: the page's thread computed for {share:.0%} of the time")
            # CPU time, whatever else this machine does; a page that redraws everything is never
            # idle.
            assert share < 0.5
        # A point of a curve stands for many steps, and its words say so.
        label = "return document.querySelector('.chart canvas').getAttribute('aria-label')"
        told = re.search(r"at steps ([\d]+)–100000, mean: ", page.execute_script(label))
        assert told and 99_600 < int(told[1]) < 99_900
        click(page, "#tab-fleet")
        box = "document.getElementById('workers-table').parentElement"
        page.execute_script(f"{box}.scrollTop = {box}.scrollHeight")
        wait(
            lambda: rows_of(page, "workers-table")[-1][0] == "rollout-0999", "the end is not shown"
        )
        sizes = [len(json.dumps(api(url, p))) for p in ("workers", "metrics?points=500", "run")]
        print("bytes of answers:", sizes)
        assert max(sizes) < 2 << 20


def _busy_share(page: Any, span_ms: int = 2000) -> float:
    """CPU time of the page's main thread over wall time, while it shows ``span_ms`` of an unchanged
    run."""
    page.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})

    def metric(name: str) -> float:
        found = page.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return next(float(m["value"]) for m in found if m["name"] == name)

    computed, began = metric("TaskDuration"), metric("Timestamp")
    page.execute_async_script("setTimeout(arguments[1], arguments[0])", span_ms)
    return (metric("TaskDuration") - computed) / (metric("Timestamp") - began)


STEPS = 24


class Improving(FakeRollout):
    """More samples of a prompt are solved with each version; of a set's four, some prompts give
    none."""

    def group_for(self, lease: rollout_pb2.Lease) -> rollout_pb2.Group:
        version, size = max(0, self.version), lease.group_size
        group = make_group(
            lease.task, completions=size, tokens=self.tokens, version=version, kind=lease.kind
        )
        solved = round(size * min(1.0, 0.2 + version / STEPS + 0.1 * (lease.index % 5)))
        for number, completion in enumerate(group.completions):
            completion.reward = float(number < solved)
            completion.answer = "right" if number < solved else f"wrong {number % 2}"
        return group


@pytest.fixture(scope="module")
def of_sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controllers]:
    directory = tmp_path_factory.mktemp("sets")
    held_out = directory / "held_out.jsonl"
    held_out.write_text(
        "".join(json.dumps({"prompt": f"s{i}=", "answer": "1"}) + "\n" for i in range(10))
    )
    settings: dict[str, Any] = {
        "data": {"eval_path": str(held_out)},
        "train": {"checkpoint_every": 1000, "eval_every": 4, "max_staleness": 1},
        "fleet": {"lease_ttl_s": 60.0},
        "controller": {"leader_lease_s": 30.0},
        "evaluation": {
            "sets": {
                "math500": {"path": str(held_out), "samples": 8},
                "aime24": {"path": str(held_out), "samples": 4},
            }
        },
    }
    with running_controllers(directory, 1, **settings) as controllers:
        asyncio.run(train(controllers, STEPS, Improving))
        yield controllers


SHOWN = """const charts = document.querySelectorAll('.chart:not([hidden])');
    return Object.fromEntries([...charts].map((chart) => [
    chart.querySelector('h3').textContent, chart.querySelector('.now').textContent]))"""
LEAD = "return document.querySelector('.chart.lead h3').textContent"
SAVED = """const done = arguments[0]; const make = URL.createObjectURL;
    URL.createObjectURL = (blob) => { blob.text().then(done); return make.call(URL, blob); };
    document.getElementById('curves-csv').click(); URL.createObjectURL = make;"""


def test_each_set_has_a_chart_of_its_reward_and_one_of_what_it_solves(
    of_sets: Controllers, page: Any
) -> None:
    errors_of(page)
    open_page(page, rest_url(of_sets), "learning")
    wait(lambda: rows_of(page, "steps-table"), "no table of steps")
    wait(lambda: "held-out" in " ".join(page.execute_script(SHOWN).values()), "no evaluation")
    assert errors_of(page) == []
    shown = page.execute_script(SHOWN)
    assert page.execute_script(LEAD) == "Reward"
    assert shown["math500: reward"] == "held-out 1"
    assert shown["math500: solved"] == "pass@1 1   pass@8 1   maj@8 1"
    assert shown["aime24: solved"] == "pass@1 1   pass@4 1   maj@4 1"
    assert shown["held_out: solved"] == "pass@1 1"
    head, first, *_ = page.execute_async_script(SAVED).splitlines()
    assert {"eval_math500/pass@2", "eval_aime24/reward", "eval_reward_mean"} <= set(head.split(","))
    assert first.startswith("0,") and len(first.split(",")) == len(head.split(","))
