"""Preference losses against values of TRL 1.16.0, and against sums written out.

tests/fixtures/preferences_of_trl_1_16.json holds four pairs of unequal lengths, some tokens masked,
and what TRL's trainers give for them: loss, and gradient by the log-prob of each token.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policy_worker.objectives.batch import StepTotals
from policy_worker.objectives.columns import TokenScores
from policy_worker.objectives.load import load_objective
from policy_worker.objectives.pairs import form_pairs, pair_weights
from policy_worker.objectives.preferences import Kto
from policy_worker.rows.group_reading import decode
from policy_worker.rows.packing import pack
from policy_worker.toy_step import totals_of
from tests.fixtures.policy_models import RECORDED_PAIRS, make_config, make_group

TRL = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "preferences_of_trl_1_16.json").read_text()
)
CPU = torch.device("cpu")
SIDES = "chosen", "rejected"


def recorded_pairs() -> list[Any]:
    """The pairs as groups of two, in which the second pair's better completion stands second."""
    groups = []
    for n, pair in enumerate(TRL["pairs"]):
        order = SIDES if n != 1 else SIDES[::-1]
        sides = [pair[side] for side in order]
        groups.append(
            make_group(
                f"t{n}",
                [1, 2],
                [[3] * len(side["mask"]) for side in sides],
                [float(side == "chosen") for side in order],
                masks=[side["mask"] for side in sides],
            )
        )
    return groups


def in_order(column: dict[str, list[list[float]]] | list[list[float]]) -> list[list[float]]:
    """TRL's rows, chosen first and rejected after, in the order of recorded_pairs()."""
    count = len(TRL["pairs"])
    found = []
    for n in range(count):
        two = [column[n], column[count + n]]
        found += two if n != 1 else two[::-1]
    return found


def flat(name: str) -> list[float]:
    rows = in_order([pair[side][name] for side in SIDES for pair in TRL["pairs"]])
    return [x for row in rows for x in row]


def computed(
    algorithm: str,
    options: dict[str, Any],
    *,
    weight: float = 1.0,
    parts: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[float, torch.Tensor, list[Any]]:
    """Loss, gradient by token, and what was measured; of rows that hold a quarter or all of the
    groups."""
    objective = load_objective(make_config(train={"algorithm": algorithm}, objective=options))
    batch = decode(recorded_pairs())
    totals = StepTotals(1, 0, int(batch.trained.sum()), len(batch.length))
    columns = objective.columns(batch, totals)
    logprobs = torch.tensor(flat("logprobs"), dtype=dtype, requires_grad=True)
    reference = torch.tensor(flat("reference"), dtype=dtype)
    total, measured = 0.0, []
    for sequences in np.split(np.arange(len(batch.length)), parts):
        micro = pack(batch, sequences, CPU)
        index = torch.from_numpy(micro.token_index)
        tokens = columns.of(micro, CPU, reference[index] if objective.frozen else None)
        own = logprobs[index]
        scores = TokenScores(own, torch.zeros_like(own), own.detach())
        loss = objective.loss(scores, tokens)
        (loss.total * weight).backward()
        total += float(loss.total.detach()) * weight
        measured.append(loss.means)
    assert logprobs.grad is not None
    return total, logprobs.grad, measured


def same(found: tuple[float, torch.Tensor, list[Any]], loss: float, gradient: Any) -> None:
    assert found[0] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    wanted = torch.tensor([x for row in in_order(gradient) for x in row], dtype=torch.float32)
    torch.testing.assert_close(found[1].float(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TRL["dpo"])
@pytest.mark.parametrize("parts", [1, 4])
def test_dpo_is_that_of_trl_with_every_loss(name: str, parts: int) -> None:
    wanted = TRL["dpo"][name]
    options = dict(wanted["options"])
    if options["loss"] == "ipo":  # TRL's is the mean over tokens
        options["loss"] = "ipo_norm"
    found = computed("dpo", options, parts=parts)
    same(found, wanted["loss"], wanted["gradient"])
    if name == "ipo":
        averaged = computed("ipo", {"beta": 0.3, "length_average": True}, parts=parts)
        same(averaged, wanted["loss"], wanted["gradient"])


def sums(side: str, name: str) -> list[float]:
    """Over the trained tokens of each pair's completion."""
    return [
        sum(x * m for x, m in zip(pair[side][name], pair[side]["mask"], strict=True))
        for pair in TRL["pairs"]
    ]


def gaps() -> list[float]:
    """Log-ratio of each chosen completion, less that of the rejected one."""
    c, r, rc, rr = (sums(s, n) for n in ("logprobs", "reference") for s in SIDES)
    return [(a - x) - (b - y) for a, b, x, y in zip(c, r, rc, rr, strict=True)]


def test_ipo_draws_the_summed_gap_to_half_the_inverse_of_beta() -> None:
    off = [gap - 1 / 0.6 for gap in gaps()]
    loss, gradient, _ = computed("ipo", {"beta": 0.3}, dtype=torch.float64)
    assert loss == pytest.approx(sum(x**2 for x in off) / 4, rel=1e-6)
    assert float(gradient[0]) == pytest.approx(2 * off[0] / 4, rel=1e-6)


def test_label_smoothing_of_the_sigmoid_weighs_both_directions() -> None:
    h = [0.3 * gap for gap in gaps()]
    each = [0.8 * math.log1p(math.exp(-x)) + 0.2 * math.log1p(math.exp(x)) for x in h]
    found = computed("dpo", {"beta": 0.3, "label_smoothing": 0.2})
    assert found[0] == pytest.approx(sum(each) / 4, rel=1e-5)


def test_the_sft_term_is_the_mean_over_tokens_of_each_chosen_completion() -> None:
    plain = computed("dpo", {"beta": 0.3})
    with_term = computed("dpo", {"beta": 0.3, "sft_coef": 0.5})
    count = [sum(pair["chosen"]["mask"]) for pair in TRL["pairs"]]
    nll = [-x / n for x, n in zip(sums("chosen", "logprobs"), count, strict=True)]
    assert with_term[0] - plain[0] == pytest.approx(0.5 * sum(nll) / 4, rel=1e-4)
    changed = (with_term[1] - plain[1])[: len(TRL["pairs"][0]["chosen"]["mask"])]
    wanted = [-0.5 / count[0] / 4 * m for m in TRL["pairs"][0]["chosen"]["mask"]]
    torch.testing.assert_close(changed, torch.tensor(wanted), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("parts", [1, 4])
def test_orpo_adds_trls_odds_ratio_to_the_mean_nll_of_the_chosen(parts: int) -> None:
    wanted = TRL["orpo_odds_ratio"]
    alone = computed("orpo", {"beta": 0.0}, parts=parts)
    both = computed("orpo", {"beta": 0.3}, parts=parts)
    same((both[0] - alone[0], both[1] - alone[1], []), wanted["loss"], wanted["gradient"])
    count = [sum(pair["chosen"]["mask"]) for pair in TRL["pairs"]]
    nll = [-x / n for x, n in zip(sums("chosen", "logprobs"), count, strict=True)]
    assert alone[0] == pytest.approx(sum(nll) / 4, rel=1e-5)


def test_orpo_is_finite_if_the_policy_is_certain() -> None:
    objective = load_objective(make_config(train={"algorithm": "orpo"}))
    batch = decode([make_group("t0", [1], [[2], [3]], [1.0, 0.0])])
    tokens = objective.columns(batch, StepTotals(1, 0, 2, 2)).of(
        pack(batch, np.arange(2), CPU), CPU, None
    )
    for certain in ([0.0, -80.0], [-80.0, 0.0], [0.0, 0.0]):
        logprobs = torch.tensor(certain, requires_grad=True)
        loss = objective.loss(TokenScores(logprobs, logprobs, logprobs.detach()), tokens)
        loss.total.backward()
        assert logprobs.grad is not None
        assert torch.isfinite(loss.total)
        assert torch.isfinite(logprobs.grad).all()


KTO = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7}


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("parts", [1, 4])
def test_kto_is_that_of_trl_whose_estimate_of_the_kl_is_the_baseline(name: str, parts: int) -> None:
    wanted = TRL[name]
    found = computed("kto", {**KTO, "baseline": wanted["kl"]}, parts=parts)
    same(found, wanted["loss"], wanted["gradient"])


def test_ktos_threshold_says_what_is_desirable() -> None:
    groups = [make_group("t0", [1], [[2], [3], [4]], [0.5, 0.2, 0.6])]
    config = make_config(train={"algorithm": "kto"}, objective={"threshold": 0.5})
    np.testing.assert_equal(Kto(config).advantages(decode(groups), totals_of(groups)), [-1, -1, 1])


@pytest.mark.parametrize("case", TRL["reward"]["cases"])
@pytest.mark.parametrize("parts", [1, 4])
def test_the_reward_model_scores_the_last_token_of_each_completion(
    case: dict[str, Any], parts: int
) -> None:
    options = {"margin": case["margin"], "center_coef": case["center_coef"]}
    config = make_config(train={"algorithm": "reward_model"}, objective=options, **RECORDED_PAIRS)
    objective = load_objective(config)
    groups = recorded_pairs()
    for group, margin in zip(groups, TRL["reward"]["margin"], strict=True):
        for completion in group.completions:
            completion.reward *= margin
    batch = decode(groups)
    columns = objective.columns(batch, StepTotals(1, 0, 1, len(batch.length)))
    scores = [[score] for score in TRL["reward"]["scores"]]
    last = np.cumsum(batch.length) - 1
    given = torch.full((len(batch.behaviour),), 7.0)
    given[last] = torch.tensor([score[0] for score in in_order(scores)])
    given.requires_grad_()
    total, right, none = 0.0, 0.0, torch.zeros(0)
    for sequences in np.split(np.arange(len(batch.length)), parts):
        micro = pack(batch, sequences, CPU)
        values = {"reward": given[torch.from_numpy(micro.token_index)]}
        tokens = columns.of(micro, CPU, None)
        loss = objective.loss(TokenScores(none, none, none, values), tokens)
        loss.total.backward()
        total += float(loss.total.detach())
        right += float(loss.means["pair_accuracy"].values.sum())
    assert total == pytest.approx(case["loss"], rel=1e-5)
    assert right / 4 == pytest.approx(case["accuracy"])
    assert given.grad is not None
    wanted = torch.zeros(len(given))
    slopes = [[slope] for slope in case["gradient"]]
    wanted[last] = torch.tensor([slope[0] for slope in in_order(slopes)])
    torch.testing.assert_close(given.grad, wanted, atol=1e-6, rtol=1e-5)


# ---- pairs


@pytest.mark.parametrize(
    ("rewards", "every", "unusable", "wanted"),
    [
        ([[0.5, 1.0, 0.0, 0.2], [0.0, 1.0], [3.0]], False, (), [(1, 2), (5, 4)]),
        ([[1.0, 1.0, 1.0], [0.0, 0.0], [0.0, 1.0]], False, (), [(6, 5)]),
        ([[1.0, 1.0, 1.0, 1.0]], True, (), []),
        # Of equal rewards the earlier counts as better.
        ([[1.0, 0.0, 1.0, 0.0]], False, (), [(0, 3)]),
        # All pairs are disjoint and go from the ends inwards.
        ([[0.1, 0.4, 0.3, 0.2, 0.5]], True, (), [(4, 0), (1, 3)]),
        ([[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]], True, (), [(0, 7), (3, 6), (4, 5)]),
        # Completions without a trained token.
        ([[1.0, 0.0, 0.5], [1.0, 0.0]], False, (0, 4), [(2, 1)]),
    ],
)
def test_the_better_and_the_worse_of_a_group_make_pairs(
    rewards: list[list[float]],
    every: bool,
    unusable: tuple[int, ...],
    wanted: list[tuple[int, int]],
) -> None:
    usable = np.ones(sum(map(len, rewards)), bool)
    usable[list(unusable)] = False
    sizes = np.array([len(group) for group in rewards])
    found = form_pairs(np.concatenate(rewards), sizes, usable, every=every)
    assert list(zip(*(side.tolist() for side in found), strict=True)) == wanted


def test_pair_weights_make_the_mean_over_the_pairs_that_a_step_could_have() -> None:
    recorded = np.array([2, 2, 2])
    np.testing.assert_allclose(pair_weights(recorded, 6, every=False), 1 / 3)
    np.testing.assert_allclose(pair_weights(recorded, 6, every=True), 1 / 3)
    sampled = np.array([8, 8])
    np.testing.assert_allclose(pair_weights(sampled, 16, every=False), 1 / 2)
    np.testing.assert_allclose(pair_weights(sampled, 16, every=True), 1 / 8)


# ---- what is measured


def test_measured_means_are_those_of_trl_and_add_up_over_rows() -> None:
    wanted = TRL["metrics"]
    for parts in (1, 4):
        _, _, measured = computed("dpo", {"beta": 0.3}, parts=parts)
        found = {
            name: sum(float(row[name].values.detach().sum()) for row in measured) / 4
            for name in measured[0]
        }
        assert found["chosen_reward"] == pytest.approx(wanted["rewards/chosen"], rel=1e-5)
        assert found["rejected_reward"] == pytest.approx(wanted["rewards/rejected"], rel=1e-5)
        assert found["pair_accuracy"] == wanted["rewards/accuracies"]
        assert found["reward_margin"] == pytest.approx(wanted["rewards/margins"], rel=1e-5)
        assert found["chosen_logprob"] == pytest.approx(wanted["logps/chosen"], rel=1e-5)
        shift = wanted["rewards/chosen"] / 0.3
        assert found["chosen_logprob_shift"] == pytest.approx(shift, rel=1e-5)
