"""Texts of payloads that have tokens alone."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from paceline.token_texts import TextDecoder
from paceline.v1 import rollout_pb2
from testbed.tiny_model import EOS, make_char_tokenizer
from tests.fixtures.policy_models import make_config

QUESTION, ANSWER = "s12=", "=3"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_char_tokenizer("0123456789s=").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def ids(model: Path, text: str) -> bytes:
    tokens = AutoTokenizer.from_pretrained(model).encode(text, add_special_tokens=False)
    return np.array(tokens, "<i4").tobytes()


def group_of(model: Path) -> rollout_pb2.Group:
    completion = rollout_pb2.Completion(tokens=ids(model, ANSWER + EOS))
    return rollout_pb2.Group(prompt_tokens=ids(model, QUESTION), completions=[completion] * 2)


def texts_of(group: rollout_pb2.Group) -> tuple[str, list[str]]:
    return group.prompt_text, [c.text for c in group.completions]


def test_texts_are_those_that_the_worker_decodes(model: Path) -> None:
    texts = TextDecoder(make_config(model=model))
    assert texts.available
    group = group_of(model)
    texts.fill(group)
    assert texts_of(group) == (QUESTION, [ANSWER, ANSWER])


def test_transcripts_of_environments_keep_their_markers(model: Path) -> None:
    texts = TextDecoder(
        make_config(model=model, rollout={"environment": "module:Class", "max_context": 64})
    )
    group = group_of(model)
    texts.fill(group)
    assert texts_of(group)[1] == [ANSWER + EOS] * 2


def test_texts_that_were_sent_stay(model: Path) -> None:
    texts = TextDecoder(make_config(model=model))
    group = group_of(model)
    group.prompt_text = "as it was"
    group.completions[0].text = "of a worker of an earlier release"
    texts.fill(group)
    assert texts_of(group) == ("as it was", ["of a worker of an earlier release", ANSWER])


def test_a_file_that_is_no_tokenizer_costs_the_texts_and_is_reported_once(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "tokenizer.json").write_text("{}")
    texts = TextDecoder(make_config(model=model))
    for _ in range(3):
        group = rollout_pb2.Group(prompt_tokens=b"\x03\0\0\0")
        texts.fill(group)
        assert group.prompt_text == ""
    assert caplog.text.count("texts not decoded") == 1
    assert not texts.available
    (model / "tokenizer.json").unlink()
    assert not TextDecoder(make_config(model=model)).available


@pytest.mark.parametrize("path", ["/no/such/model", "someone/no-such-model", "a b c"])
def test_a_controller_without_the_tokenizer_says_so(path: str) -> None:
    texts = TextDecoder(make_config(model=path))
    assert not texts.available
    group = rollout_pb2.Group(prompt_tokens=b"\x03\0\0\0")
    texts.fill(group)
    assert group.prompt_text == ""
