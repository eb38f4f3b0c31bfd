"""Whatever is sent that the description allows, and what it does not: a documented answer."""

import re
from typing import Any

import hypothesis
import pytest
import schemathesis
import schemathesis.specs.openapi.checks as conformance

from testbed.fleets.controller_processes import Controllers
from tests.fixtures.rest import bearer, rest_url

EXAMPLES = 25
FEWER = 3
"""Where the answer does not depend on what is sent."""
# A run that is stopped answers no more commands.
LEFT_OUT = r"/stop$"
READS = ("get", "head")


def operations(url: str) -> list[Any]:
    schema = schemathesis.openapi.from_url(url + "/api/v1/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    tried = [x for x in found if not re.search(LEFT_OUT, x.path)]
    assert len(tried) > 18
    return tried


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
def test_every_answer_is_as_described(served: Controllers, mode: Any) -> None:
    for operation in operations(rest_url(served)):
        seen = check(operation, mode, bearer(served), EXAMPLES)
        assert 307 not in seen and 401 not in seen, operation.path


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
def test_a_standby_sends_on_what_is_valid_and_refuses_the_rest(
    served: Controllers, mode: Any
) -> None:
    for operation in operations(rest_url(served, 1)):
        seen = check(operation, mode, bearer(served), FEWER)
        valid = mode is schemathesis.GenerationMode.POSITIVE
        if operation.method not in READS:
            assert seen <= ({307} if valid else {307, 400, 404, 405, 413, 422}), operation.path


def check(operation: Any, mode: Any, headers: dict[str, str], examples: int) -> set[int]:
    """The status codes of the answers, all of them as the description has it."""
    checks = [
        schemathesis.checks.not_a_server_error,
        conformance.status_code_conformance,
        conformance.content_type_conformance,
        conformance.response_schema_conformance,
    ]
    if mode is schemathesis.GenerationMode.NEGATIVE:
        checks.append(conformance.negative_data_rejection)
    seen: set[int] = set()

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def each(case: Any) -> None:
        response = case.call(headers=headers, allow_redirects=False)
        seen.add(response.status_code)
        case.validate_response(response, checks=checks)
        assert "Traceback" not in response.text

    try:
        each()
    except hypothesis.errors.Unsatisfiable:
        pass  # nothing that the operation takes can be wrong
    return seen
