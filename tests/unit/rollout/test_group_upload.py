"""Uploaded groups: texts that the controller decodes are not stored, and nothing else changes."""

import pytest

from paceline.payloads.store import PayloadStore, decode, payload_digest
from paceline.v1 import rollout_pb2
from rollout_worker.tasks import outbox
from rollout_worker.tasks.outbox import Encoded, GroupUpload
from tests.fixtures.policy_models import make_config, random_groups


class Store:
    largest = 1 << 30


def upload(texts: bool) -> GroupUpload:
    store: PayloadStore = Store()  # type: ignore[assignment]
    return GroupUpload.of(make_config(), store, texts=texts)


def group_of() -> rollout_pb2.Group:
    (group,) = random_groups(1, group_size=3, seed=1, vocab=15, longest=400, shortest=300)
    group.prompt_text = "what the tokens say"
    for completion in group.completions:
        completion.text = "word" * (len(completion.tokens) // 4)
    return group


async def encoded(texts: bool, group: rollout_pb2.Group) -> Encoded:
    (found,) = await upload(texts).encode([group])
    assert isinstance(found, Encoded)
    return found


@pytest.mark.parametrize("inline_bytes", [0, 1 << 16])
async def test_a_payload_without_texts_is_a_third_smaller_and_otherwise_the_same(
    inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "_INLINE_BYTES", inline_bytes)
    group = group_of()
    # In either order: a worker encodes a group again if its controller has changed.
    whole, bare = await encoded(True, group), await encoded(False, group)
    assert decode((await encoded(True, group)).payload).prompt_text
    assert len(bare.payload) < 0.68 * len(whole.payload)
    assert bare.facts.digest == payload_digest(bare.payload)
    whole.facts.digest = bare.facts.digest
    assert whole.facts == bare.facts
    found = decode(bare.payload)
    assert not found.prompt_text and not any(c.text for c in found.completions)
    found.prompt_text = group.prompt_text
    for completion, before in zip(found.completions, group.completions, strict=True):
        completion.text = before.text
    assert found == group
