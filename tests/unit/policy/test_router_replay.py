"""The engine's choice of experts travels with the tokens, and the trainer makes the same one."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.expert_routes import expert_layers
from paceline.payloads.group_limits import GroupLimits, Invalid
from paceline.payloads.group_payload import check_group
from paceline.payloads.routes import UNKNOWN, encoded, note_routes
from policy_worker.model import attention
from policy_worker.model.heads import make_scorer, score
from policy_worker.model.policy_model import _prepared
from policy_worker.objectives.batch import BadGroup, key_of
from policy_worker.objectives.load import load_objective
from policy_worker.ranks.sharding import load_sharded_state
from policy_worker.rows.group_reading import AcceptedGroup, ModelLimits, decode, read_batch
from policy_worker.rows.packing import pack
from policy_worker.rows.replica import Replica
from policy_worker.rows.row_forwards import RowForwards
from rollout_worker.engine.base import EngineError, Request, SamplingParams
from rollout_worker.engine.transformers.engine import TransformersEngine
from testbed.architectures import tiny_architecture
from tests.fixtures.engines import tiny_config
from tests.fixtures.policy_models import make_config, make_group
from tests.unit.policy.test_probe import network

CPU = torch.device("cpu")
EXPERTS = ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "granitemoehybrid", "kimi_linear"]
PROMPTS = [[3, 9, 4], [5, 6, 7, 8, 9], [4, 4]]


def trainer_of(family):
    attention.register()
    model = tiny_architecture(family, attention=attention.BLOCKS)
    make_scorer(model)
    return _prepared(model, make_config().model, CPU, trainable=True)


async def sampled(family, path, dtype):
    """Groups of two completions from an engine of two slots, with their routes."""
    tiny_architecture(family).save_pretrained(path)
    config = tiny_config(path, slots=2, max_tokens=9, router_replay=True, dtype=dtype)
    engine = TransformersEngine(config, SimpleNamespace(decode_all=str, end_tokens=()))
    await engine.start()
    requests = [
        Request(f"r{n}", np.array(prompt, np.int32), SamplingParams(9 - 3 * n, seed=n), 2)
        for n, prompt in enumerate(PROMPTS)
    ]
    made = await asyncio.gather(*map(engine.generate, requests))
    await engine.close()
    groups = []
    for number, completions in enumerate(made):
        tokens = [c.tokens.tolist() for c in completions]
        logprobs = [c.logprobs.tolist() for c in completions]
        group = make_group(f"t0-{number}", PROMPTS[number], tokens, [0.0, 1.0], logprobs=logprobs)
        note_routes(group, completions[0].prompt_routes, [c.routes for c in completions])
        groups.append(group)
    return groups


@pytest.mark.parametrize("family", EXPERTS)
async def test_the_trainer_takes_the_experts_of_the_engine(family, tmp_path):
    """In bfloat16 the routers of engine and trainer may differ; the routes decide."""
    groups = await sampled(family, tmp_path, "bfloat16")
    model = trainer_of(family)
    batch = decode(groups)
    assert (batch.prompt_routes != UNKNOWN).all()
    micro = pack(batch, np.arange(6), CPU)
    assert (micro.packing.routes >= 0).all()  # of every input
    score(model, micro, 1.0).logprobs.sum().backward()
    layers = expert_layers(model)
    agreement = torch.stack(micro.packing.agreement)
    assert len(agreement) == len(layers) and (agreement[:, 1] > 0).all()
    share = agreement.sum(0)
    assert 0.5 < share[0] / share[1] <= 1.0
    moved = pack(batch, np.arange(6), CPU)
    moved.packing.routes = (moved.packing.routes + 1) % 4
    before = score(model, micro, 1.0).logprobs
    assert (score(model, moved, 1.0).logprobs - before).abs().max() > 1e-3
    gates = [p for n, p in model.named_parameters() if "gate" in n or "router" in n]
    assert any(p.grad is not None and p.grad.any() for p in gates)


async def test_replay_equals_the_engine_and_its_choice_decides(tmp_path):
    groups = await sampled("qwen3_moe", tmp_path, "float32")
    model, batch = trainer_of("qwen3_moe"), decode(groups)
    micro = pack(batch, np.arange(6), CPU)
    found = score(model, micro, 1.0).logprobs
    torch.testing.assert_close(found, torch.from_numpy(batch.behaviour), atol=1e-5, rtol=0)
    taken, wanted = torch.stack(micro.packing.agreement).sum(0)
    assert taken == wanted == micro.packing.routes.numel()
    moved = pack(batch, np.arange(6), CPU)
    moved.packing.routes = (moved.packing.routes + 1) % 4
    score(model, moved, 1.0)
    taken, wanted = torch.stack(moved.packing.agreement).sum(0)
    assert taken < wanted
    live = pack(batch, np.arange(6), CPU)
    live.packing.routes = torch.full_like(live.packing.routes, -1)
    torch.testing.assert_close(score(model, live, 1.0).logprobs, found, atol=1e-5, rtol=0)


async def test_reference_and_other_models_choose_for_themselves(tmp_path):
    groups = await sampled("qwen3_moe", tmp_path, "float32")
    config = make_config(model=tmp_path, train={"kl_coef": 0.1})
    state = load_sharded_state(config, Replica(), CPU)
    frozen = {"reference": trainer_of("qwen3_moe")}
    forwards = RowForwards(load_objective(config), state, frozen)
    batch = decode(groups)
    noted = pack(batch, np.arange(6), CPU)
    noted.packing.routes = (noted.packing.routes + 1) % 4
    live = pack(batch, np.arange(6), CPU)
    live.packing.routes = None
    (scores, reference), (plain, expected) = forwards.scores(noted), forwards.scores(live)
    assert torch.equal(reference, expected)
    assert (scores.logprobs - plain.logprobs).abs().max() > 1e-3
    assert len(noted.packing.agreement) == 2


@pytest.mark.parametrize("expert, width", [(4, 4), (9, 4), (0, 6)])
def test_routes_of_another_model_are_the_groups_fault(expert, width):
    group = make_group("t0-0", [3, 4], [[5, 6]], [1.0])
    note_routes(group, np.full((2, width), expert, np.uint16), [None])
    accepted = [AcceptedGroup(key_of(group))]
    with pytest.raises(BadGroup, match="expert"):
        read_batch([group], accepted, ModelLimits(40, routes_width=4, experts=4))
    fits = make_group("t0-0", [3, 4], [[5, 6]], [1.0])
    note_routes(fits, np.full((2, 4), 3, np.uint16), [np.full((2, 4), UNKNOWN, np.uint16)])
    read_batch([fits], accepted, ModelLimits(40, routes_width=4, experts=4))


async def test_routers_whose_choices_are_not_seen_are_refused(tmp_path):
    network("phimoe").save_pretrained(tmp_path)
    config = tiny_config(tmp_path, router_replay=True)
    engine = TransformersEngine(config, SimpleNamespace(decode_all=str, end_tokens=()))
    with pytest.raises(EngineError, match=r"rollout\.router_replay.*routers are not seen"):
        await engine.start()


@pytest.mark.parametrize(
    "routes, width, why",
    [
        (b"not zlib", 4, "no zlib stream"),
        (encoded(np.zeros((5, 4), np.uint16)), 4, "2 tokens do not have 4"),
        (encoded(np.zeros((2, 4), np.uint16)), 3, "do not have 3"),
        (encoded(np.zeros((1 << 20, 4), np.uint16)), 4, "do not have 4"),
        (encoded(np.zeros((2, 4), np.uint16)), 0, "routes_width is 0"),
        (b"", 1 << 20, "routes_width is"),
    ],
    ids=["noise", "long", "narrow", "bomb", "no-width", "wide"],
)
def test_routes_that_fit_no_token_are_refused(routes, width, why):
    group = make_group("t0-0", [3, 4], [[5, 6]], [1.0])
    group.routes_width, group.completions[0].routes = width, routes
    limits = GroupLimits(group_size=1, max_sequence_tokens=64)
    with pytest.raises(Invalid, match=why):
        check_group(group, limits, 1)
    if 0 < width < 9:
        with pytest.raises(BadGroup, match=why):
            decode([group])
