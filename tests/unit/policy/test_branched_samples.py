"""Samples of several sequences: a row is a forest of what they share, and its scores and gradients
are those of each sequence alone."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier

import numpy as np
import pytest
import torch

from controller.directives import message_of
from paceline.payloads.group_limits import GroupLimits
from paceline.payloads.group_payload import encode
from paceline.payloads.routes import note_routes
from paceline.v1 import policy_pb2
from policy_worker.model import attention, row_layout
from policy_worker.model.heads import make_scorer, score
from policy_worker.model.policy_model import _prepared
from policy_worker.objectives.advantages import token_advantages
from policy_worker.objectives.batch import BadGroup
from policy_worker.objectives.load import load_objective
from policy_worker.rows.group_reading import (
    AcceptedGroup,
    ModelLimits,
    decode,
    planned_lengths,
    read_batch,
)
from policy_worker.rows.packing import attended_tokens, pack, plan_rows
from policy_worker.rows.replica import Replica
from policy_worker.rows.row_shards import RowShards
from testbed.architectures import tiny_architecture
from tests.fixtures.group_meta import accepted as meta_of
from tests.fixtures.policy_models import (
    branch,
    branched_groups,
    make_config,
    make_group,
    paths_of_group,
    tiny_network,
)
from tests.fixtures.training_steps import flat, keys, make_gradients, step_totals

CPU = torch.device("cpu")


def rows_of(groups, limit, seed=0):
    """Rows of some of the sequences of ``groups``, each with its path."""
    batch = decode(groups)
    paths = [path for group in groups for path in paths_of_group(group)]
    keep = np.flatnonzero(np.random.default_rng(seed).random(len(paths)) < (seed % 3 + 1) / 3)
    assert attended_tokens(batch, keep).tolist() == [len(paths[s][0]) - 1 for s in keep]
    return batch, paths, plan_rows(batch, keep, limit)


def numbered(groups):
    """Gives each token of ``groups`` an expert of its own, by which it is known in a row."""
    places = iter(range(1 << 16))

    def take(tokens):
        return np.array([[next(places)] for _ in range(len(tokens) // 4)], np.uint16)

    for group in groups:
        prompt = take(group.prompt_tokens)
        note_routes(group, prompt, [take(c.tokens) for c in group.completions])
    return groups


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("limit", [25, 80, 1000])
def test_each_token_of_a_row_sees_its_own_path_and_nothing_else(limit, last, monkeypatch):
    """Against every path written out, of random trees, of which some sequences are left out."""
    monkeypatch.setitem(row_layout.BLOCK_SCORES, "cpu", 64)
    for seed in range(8):
        groups = numbered(branched_groups(4, samples=3, seed=seed))
        batch, paths, rows = rows_of(groups, limit, seed)
        as_routes = [path for group in groups for path in paths_of_group(group, by_routes=True)]
        for row in rows:
            micro = pack(batch, row, CPU, last_tokens=last)
            packing, routes = micro.packing, micro.packing.routes[:, 0].numpy()
            assert len(set(routes)) == len(routes)  # what is shared is there once
            at = np.arange(len(routes))
            sees = (at <= at[:, None]) & (at[:, None] < packing.seen_until.numpy())
            seen = [np.flatnonzero(line).tolist() for line in sees]
            assert [len(places) - 1 for places in seen] == micro.position_ids[0].tolist()
            assert computed(packing) == seen
            for n, s in enumerate(row):
                (path, before), (route, _) = paths[s], as_routes[s]
                mine = micro.sequence_of.numpy() == n
                assert micro.targets.numpy()[mine].tolist() == path[before:].tolist()
                for end, place in enumerate(micro.predict_from.numpy()[mine], before):
                    if end:  # nothing predicts the first token of a path
                        assert routes[seen[place]].tolist() == route[:end].tolist()
                        assert (
                            micro.input_ids[0].numpy()[seen[place]].tolist() == path[:end].tolist()
                        )
                for end, place in enumerate(micro.token_at.numpy()[mine] if last else (), before):
                    assert routes[seen[place]].tolist() == route[: end + 1].tolist()


def computed(packing):
    """Places that attention by blocks shows to each token of the row."""
    blocks, collapse = packing.blocks
    slots = [
        grid[: place + 1].tolist()
        for block in blocks
        for grid in block.gather.view(block.sequences, block.length)
        for place in range(block.length)
    ]
    return [slots[slot] for slot in collapse]


ATTENTION = {
    "blocks": (attention.packed_attention, {}),
    "blocks, window": (attention.packed_attention, {"sliding_window": 5}),
    "blocks, sinks": (attention.packed_attention, {"s_aux": torch.tensor([0.5, -1.0, 0.1, 2.0])}),
    "flex": (attention.packed_flex_attention, {}),
    "flex, window": (attention.packed_flex_attention, {"sliding_window": 5}),
    "flex, sinks": (
        attention.packed_flex_attention,
        {"s_aux": torch.tensor([0.5, -1.0, 0.1, 2.0])},
    ),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_over_a_forest_equals_attention_over_each_path(kind):
    """In float64, outputs and gradients."""
    attend, given = ATTENTION[kind]
    batch, paths, rows = rows_of(numbered(branched_groups(3, samples=2, seed=4)), 1000, seed=2)
    packing = pack(batch, rows[0], CPU).packing
    assert len(rows[0]) == len(paths)
    rng = torch.Generator().manual_seed(0)
    tokens = packing.forest.total
    q, k, v, of_out = (
        torch.randn(1, heads, tokens, 8, dtype=torch.float64, generator=rng)
        for heads in (4, 2, 2, 4)
    )
    found = []
    for row in (packing, None):
        mine = [x.clone().requires_grad_() for x in (q, k, v)]
        if row is not None:
            out = attend(None, *mine, None, packing=row, scaling=0.3, **given)[0].transpose(1, 2)
        else:
            out = torch.zeros_like(q)
            for path in computed(packing):
                part = [x[:, :, path] for x in mine]
                alone = attention.packed_attention(None, *part, None, scaling=0.3, **given)[0]
                place = torch.tensor(path[-1:])
                out = out.index_add(2, place, alone.transpose(1, 2)[:, :, -1:])
        (out * of_out).sum().backward()
        found.append([out.detach(), *(x.grad for x in mine)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3", attention.BLOCKS),
        ("mistral", attention.FLEX),  # windows of 16 tokens
        ("gpt_oss", attention.BLOCKS),  # sinks, and windows of 8 tokens
        ("qwen3_next", attention.BLOCKS),  # gated delta rule, experts
        ("nemotron_h", attention.BLOCKS),  # state-space layers
    ],
)
def test_gradients_of_branched_samples_are_the_sums_of_their_sequences_alone(family, kind):
    attention.register()
    groups = branched_groups(3, samples=2, seed=4, longest=12, vocab=24)
    batch, paths, rows = rows_of(groups, 90, seed=2)
    assert sum(map(len, rows)) == len(paths) and len(rows) > 1
    model = tiny_architecture(family, attention=kind)
    alone = tiny_architecture(family, attention="eager")
    make_scorer(model)
    _prepared(model, make_config().model, CPU, trainable=True)
    weights = torch.tensor(batch.trained) * torch.linspace(-1, 1, len(batch.tokens)) / len(paths)
    scored = torch.empty(len(batch.tokens))
    for row in rows:
        micro = pack(batch, row, CPU)
        logprobs = score(model, micro, 1.0).logprobs
        (logprobs * weights[micro.token_index]).sum().backward()
        scored[micro.token_index] = logprobs.detach()
    starts = np.cumsum(batch.length) - batch.length
    for start, (path, before) in zip(starts, paths, strict=True):
        ids = torch.tensor(path)[None]
        logits = torch.log_softmax(alone(input_ids=ids, use_cache=False).logits[0], -1)
        first = max(before, 1)
        logprobs = logits[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0]
        mine = slice(start + first - before, start + len(path) - before)
        (logprobs * weights[mine]).sum().backward()
        torch.testing.assert_close(scored[mine], logprobs.detach(), atol=5e-6, rtol=1e-5)
    for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, other.grad, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def reference(config, groups, totals):
    """Gradient of a step, of each path alone: plain policy gradient on policy."""
    model = tiny_network("qwen3")
    loss = config.train.loss
    for group in groups:
        every = [*zip(group.completions, paths_of_group(group), strict=True)]
        firsts = [n for n, (c, _) in enumerate(every) if not c.HasField("branch")]
        rewards = torch.tensor([every[n][0].reward for n in firsts])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for advantage, sample in zip(
            advantages, np.split(np.arange(len(every)), firsts)[1:], strict=True
        ):
            masks = {
                n: every[n][0].loss_mask or b"\x01" * (len(every[n][0].tokens) // 4) for n in sample
            }
            for n, mask in masks.items():
                together = sum(map(sum, masks.values())) if loss.branches == "sample" else sum(mask)
                whole = loss.aggregation == "token_mean"
                weight = 1 / totals.tokens if whole else 1 / (together * totals.sequences)
                path, before = every[n][1]
                ids = torch.tensor(path)[None]
                logits = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0], -1)
                logprobs = logits[:-1].gather(1, ids[0, 1:, None])[:, 0][max(before, 1) - 1 :]
                kept = torch.tensor(list(mask))[len(mask) - len(logprobs) :]
                (-advantage * weight * (logprobs * kept).sum()).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize(
    ("aggregation", "branches"),
    [("token_mean", "sample"), ("sequence_mean", "sample"), ("sequence_mean", "each")],
)
def test_a_step_weighs_a_branched_sample_as_one_or_by_its_sequences(aggregation, branches):
    """Totals are those of the facts that a controller has."""
    settings = {"aggregation": aggregation, "branches": branches, "surrogate": "weight"}
    settings |= {"proximal": "trainer", "tis_cap": None, "tokens_per_microbatch": 60}
    config = make_config(train=settings)
    groups = branched_groups(4, samples=3, seed=9)
    limits = GroupLimits(3, 1 << 20, each_branch=branches == "each")
    metas = [meta_of(group, limits, newest_version=0) for group in groups]
    totals = replace(
        step_totals(groups),
        tokens=sum(meta.tokens for meta in metas),
        sequences=sum(n for meta in metas for _, n in meta.sequence_versions),
    )
    wanted = reference(config, groups, totals)
    for parts in ([groups], [groups[:1], groups[1:]]):
        gradients = make_gradients(config)
        gradients.begin(totals, keys(groups))
        for part in parts:
            gradients.add(part)
        torch.testing.assert_close(flat(gradients), wanted, atol=1e-6, rtol=1e-4)
        assert gradients.stats.entries["loss"][1] == pytest.approx(1.0)


class Rank(Replica):
    """One of two ranks that are threads of this process."""

    size = 2

    def __init__(self, rank, told, both):
        super().__init__()
        self.rank, self.told, self.both = rank, told, both

    def gather(self, value):
        self.told[self.rank] = value
        self.both.wait()
        found = [*self.told]
        self.both.wait()
        return found


def test_two_ranks_share_the_rows_of_branched_samples():
    """Rows are planned from what a plan says of the groups, before a payload is read."""
    config = make_config(train={"tokens_per_microbatch": 60, "skip_zero_advantage": False})
    groups = branched_groups(5, samples=3, seed=2)
    totals, limits = step_totals(groups), GroupLimits(3, 1 << 20)
    payloads = dict(zip(keys(groups), map(encode, groups), strict=True))
    metas = [meta_of(group, limits, newest_version=0) for group in groups]
    planned = [
        AcceptedGroup.of(key, message_of(policy_pb2.PlannedGroup, meta))
        for key, meta in zip(payloads, metas, strict=True)
    ]
    assert planned_lengths(planned).prefix.tolist() == decode(groups).prefix.tolist()

    def part(rank, gradients):
        gradients.begin(totals, keys(groups))
        shards = RowShards(gradients.objective, config, rank)
        share = shards.take(planned, totals, gradients.limits, lambda k: [payloads[n] for n in k])
        gradients.add_share(share)
        return flat(gradients), share

    told, both = [None, None], Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as threads:
        ranks, each = zip(
            *((Rank(n, told, both), make_gradients(config)) for n in (0, 1)), strict=True
        )
        (one, a), (other, b) = threads.map(part, ranks, each)
    assert a.trained == b.trained == totals.sequences and a.rows and b.rows
    assert sum(map(len, (*a.rows, *b.rows))) == sum(len(group.completions) for group in groups)
    alone = make_gradients(config)
    alone.begin(totals, keys(groups))
    alone.add(groups)
    torch.testing.assert_close(one + other, flat(alone), atol=1e-6, rtol=1e-4)


def test_a_payload_whose_paths_are_not_those_that_were_accepted_is_refused():
    group = branched_groups(1, samples=2, seed=1)[0]
    branch(group, len(group.completions) - 1, 0, [1, 2, 3])
    meta = meta_of(group, GroupLimits(2, 1 << 20), newest_version=0)
    planned = message_of(policy_pb2.PlannedGroup, meta)
    (key,) = keys([group])
    read = partial(read_batch, [group], limits=ModelLimits(40))
    read([AcceptedGroup.of(key, planned)])
    planned.prefixes[-1] += 1
    with pytest.raises(BadGroup, match="other counts than were accepted"):
        read([AcceptedGroup.of(key, planned)])
    group.completions[-1].loss_mask = b"\1\1\1"
    with pytest.raises(BadGroup, match="nothing predicts it"):
        decode([group])
    group.completions[-1].branch.of = len(group.completions)
    with pytest.raises(BadGroup, match="name one of its sample before it"):
        decode([group])


def test_a_token_of_a_branch_counts_what_other_sequences_of_its_sample_got():
    """What its own path got before a token is no part of the token's advantage."""
    group = make_group("t0", [1], [[2, 3], [4, 5]], [3.0, 0.0])
    group.ClearField("completions")
    plain = make_group("t0", [1], [[2, 3], [4, 5]], [3.0, 0.0]).completions
    group.completions.append(plain[0])
    branch(group, 0, 2, [6, 7, 8])
    group.completions.append(plain[1])
    group.completions[0].token_rewards.add(token=0, reward=0.5)
    group.completions[1].token_rewards.add(token=1, reward=2.0)
    for advantage, wanted in (
        ("group_step", [1.5, 1.0, 1.0, 1.0, -1.0, -1.5, -1.5]),
        ("group", [0.25, 1.0, 1.0, 1.0, 0.25, -0.25, -0.25]),
    ):
        loss = make_config(train={"advantage": advantage, "advantage_norm": False}).train.loss
        found = token_advantages(decode([group]), step_totals([group]), loss)
        # Of group_step the reward to go, 3 less what it got, less the mean of 1.5. Of group, the
        # left 0.5 less its mean of 0.25, and each reward of a token less their mean of 1.25.
        assert found.tolist() == pytest.approx(wanted)


def test_a_path_gets_the_same_advantages_as_one_transcript_or_with_its_end_as_a_branch():
    """Of two branches in a row, the second shares what the first got, too."""
    plain, split = (make_group("t0", [1], [[2, 3, 4, 5, 6], [9, 9]], [2.0, 0.5]) for _ in range(2))
    last = split.completions.pop()
    split.completions[0].CopyFrom(make_group("t0", [1], [[2, 3]], [2.0]).completions[0])
    branch(split, 0, 3, [4])
    branch(split, 1, 4, [5, 6])
    split.completions.append(last)
    for sequence, token, group in ((0, 1, plain), (0, 2, plain), (0, 1, split), (1, 0, split)):
        group.completions[sequence].token_rewards.add(token=token, reward=1.0)
    for advantage in ("group", "leave_one_out", "step", "group_step"):
        loss = make_config(train={"advantage": advantage}).train.loss
        found = [token_advantages(decode([g]), step_totals([g]), loss) for g in (plain, split)]
        assert found[0].tolist() == pytest.approx(found[1].tolist())
    ppo = load_objective(make_config(train={"algorithm": "ppo"}))
    rewards = [ppo.advantages(decode([g]), step_totals([g])).tolist() for g in (plain, split)]
    # A sequence gets at its end what its sample got elsewhere; so the sums to the end are equal.
    assert rewards == [[0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.5], [0.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.5]]
