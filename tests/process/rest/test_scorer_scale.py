"""Desired numbers of scorers, over REST and on the dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import running_controllers
from tests.fixtures.browser import browser, errors_of
from tests.fixtures.rest import bearer, rest_url
from tests.process.rest.test_dashboard import api, open_page, text, wait


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controllers]:
    directory = tmp_path_factory.mktemp("scored")
    scorer = {"kind": "reward_model", "path": str(directory)}
    settings = {
        "scorers": {"helpful": scorer},
        "reward": {"functions": ["scorer:helpful"]},
        "controller": {"leader_lease_s": 30.0},
    }
    with running_controllers(directory, 1, **settings) as controllers:
        yield controllers


def test_scorers_are_scaled_by_name(scored: Controllers) -> None:
    url, headers = rest_url(scored), bearer(scored)
    before = api(url, "run")["desired"]
    assert before["scorer:helpful"] == 1

    def scale(**body: Any) -> httpx.Response:
        return httpx.post(f"{url}/api/v1/scale", json=body, headers=headers)

    done = scale(scorers={"helpful": 3}, expected={"scorers": {"helpful": 1}})
    assert done.status_code == 200 and "scorer:helpful=3" in done.json()["message"]
    assert api(url, "run")["desired"] == {**before, "scorer:helpful": 3}
    stale = scale(scorers={"helpful": 4}, expected={"scorers": {"helpful": 1}})
    assert stale.status_code == 409
    unknown = scale(scorers={"helpfull": 2})
    assert unknown.status_code in (409, 422)
    assert "there is no role 'scorer:helpfull': one of" in unknown.json()["detail"]
    assert scale(scorers={"helpful": -1}).status_code == 422
    assert scale(scorers={"helpful": 1}).status_code == 200


def test_the_dashboard_has_a_field_for_each_scorer(
    scored: Controllers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    url = rest_url(scored)
    with browser(tmp_path_factory.mktemp("chromium")) as page:
        open_page(page, url, "fleet")
        token = bearer(scored)["Authorization"].split()[1]
        page.execute_script("sessionStorage.setItem('paceline-token', arguments[0])", token)
        found = "return document.getElementById('scale-scorer:helpful')?.value"
        wait(lambda: page.execute_script(found) == "1", "no field")
        page.execute_script(
            "const e = document.getElementById('scale-scorer:helpful'); e.value = '2';"
            "e.dispatchEvent(new Event('input'));"
            "document.querySelector('#scale-form button').click()"
        )
        opened = "return document.getElementById('dialog').open"
        wait(lambda: page.execute_script(opened), "no dialog")
        assert text(page, "dialog-text") == "Scorers helpful: 1 → 2."
        page.execute_script("document.getElementById('dialog-yes').click()")
        wait(lambda: api(url, "run")["desired"]["scorer:helpful"] == 2, "no effect")
        assert errors_of(page) == []
        waiting = (
            "const done = arguments[0]; import('/static/views/fleet.js').then(({ waitingText }) =>"
            " done([{ queued: 1 }, { queued: 7 }, {}].map((gauges) =>"
            " waitingText({ held_leases: 0, gauges }))))"
        )
        told = page.execute_async_script(waiting)
        assert told == [" (1 completion waiting)", " (7 completions waiting)", ""]
