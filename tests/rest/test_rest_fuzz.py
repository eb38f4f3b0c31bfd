"""Whatever is sent that the description allows, and what it does not: a documented answer."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.processes import Controllers
from tests.helpers.rest import bearer, rest_url

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
hypothesis = pytest.importorskip("hypothesis")
conformance = pytest.importorskip("schemathesis.specs.openapi.checks")

EXAMPLES = 6
# The stream has no end, and a run that is stopped answers no more commands.
LEFT_OUT = r"/events/stream$|/stop$"


def test_every_answer_is_as_described(served: Controllers) -> None:
    schema = schemathesis.openapi.from_url(rest_url(served) + "/api/v1/openapi.json")
    headers = bearer(served)
    operations = [result.ok() for result in schema.get_all_operations()]
    tried = [x for x in operations if not re.search(LEFT_OUT, x.path)]
    assert len(tried) > 18
    for operation in tried:
        for mode in schemathesis.GenerationMode:
            strategy = operation.as_strategy(generation_mode=mode)
            check(strategy, headers)


def check(strategy: Any, headers: dict[str, str]) -> None:
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def each(case: Any) -> None:
        response = case.call(headers=headers)
        case.validate_response(
            response,
            checks=[
                schemathesis.checks.not_a_server_error,
                conformance.status_code_conformance,
                conformance.content_type_conformance,
                conformance.response_schema_conformance,
            ],
        )
        assert "Traceback" not in response.text

    try:
        each()
    except hypothesis.errors.Unsatisfiable:
        pass  # nothing that the operation takes can be wrong
