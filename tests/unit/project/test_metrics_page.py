"""docs/metrics.md defines every metric that a step reports, and no other."""

import ast
import re
from pathlib import Path

import pytest

from controller.ledger import specs
from controller.ledger.events import steps as events
from policy_worker.conformance import toy_config
from policy_worker.step.stats import count_rewards
from policy_worker.toy_step import ToyStep
from tests.fixtures.ledgers import Driven

ROOT = Path(__file__).parents[3]
VARIANTS = [
    ("grpo", {}, {"loss": {"kl_coef": 0.1}}),
    ("ppo", {"kl_controller": "adaptive"}, {"loss": {"kl_coef": 0.1}}),
    ("distill", {"teacher": "teacher"}, {}),
    *((name, {}, {}) for name in ("sft", "dpo", "orpo", "kto", "reward_model")),
]
NAMED = {
    "reward/NAME": r"reward/(?!.*/std$).+",
    "reward/NAME/std": r"reward/.+/std",
    "source_share_NAME": r"source_share_.+",
    "source_reward_NAME": r"source_reward_.+",
    "grad_norm_NAME": r"grad_norm_.+",
}


def on_the_page() -> set[str]:
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def of_a_step() -> set[str]:
    """Names in the row of a step whose votes have the statistics of every objective."""
    stats = {}
    for algorithm, options, train in VARIANTS:
        toy = ToyStep(toy_config(algorithm, options, train))
        gradients = toy.gradients(toy.groups)
        for group in toy.groups:
            for completion in group.completions:
                completion.reward_components["exact"] = completion.reward
        count_rewards(gradients.stats, toy.groups)
        stats |= gradients.stats.entries
    run = Driven.fleet("p0", "r0", groups_per_step=4)
    run.fill("r0", 4)
    run.vote("p0", stats={name: specs.StatValue(*entry) for name, entry in stats.items()})
    return set(run.event(events.StepCommitted).metrics) | timings()


def timings() -> set[str]:
    tree = ast.parse((ROOT / "policy_worker/training_steps.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {
        call.args[0].value
        for call in calls
        if ast.unparse(call.func) == "stats.set" and isinstance(call.args[0], ast.Constant)
    }


@pytest.fixture(scope="module")
def reported() -> set[str]:
    return of_a_step()


def page_name(name: str) -> str:
    return next((page for page, rule in NAMED.items() if re.fullmatch(rule, name)), name)


def test_every_metric_of_a_step_is_defined(reported):
    assert {page_name(name) for name in reported} - on_the_page() == set()


def test_every_definition_is_of_a_metric(reported):
    """The code names those that this step has not: of sources or left-out groups."""
    folders = (ROOT / "controller/ledger", ROOT / "policy_worker")
    code = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    for name in on_the_page() - {page_name(name) for name in reported}:
        assert re.sub(r"NAME|_response_tokens_mean", "", name) in code, name
