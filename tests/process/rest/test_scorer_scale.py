"""Desired numbers of scorers over REST."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import running_controllers
from tests.fixtures.rest import bearer, rest_url
from tests.process.rest.test_dashboard import api


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
