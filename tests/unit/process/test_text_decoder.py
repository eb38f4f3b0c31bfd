"""Texts of payloads that have tokens alone: decoded by a child process, whose end costs texts and
nothing else."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from paceline.token_texts import text_decoder
from paceline.token_texts.text_decoder import TextDecoder
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
    texts.close()


def test_transcripts_of_environments_keep_their_markers(model: Path) -> None:
    texts = TextDecoder(
        make_config(model=model, rollout={"environment": "module:Class", "max_context": 64})
    )
    group = group_of(model)
    texts.fill(group)
    assert texts_of(group)[1] == [ANSWER + EOS] * 2
    texts.close()


def test_texts_that_were_sent_stay(model: Path) -> None:
    texts = TextDecoder(make_config(model=model))
    group = group_of(model)
    group.prompt_text = "as it was"
    group.completions[0].text = "of a worker of an earlier release"
    texts.fill(group)
    assert texts_of(group) == ("as it was", ["of a worker of an earlier release", ANSWER])
    texts.close()


@pytest.mark.timeout(60)
def test_a_stopped_decoder_does_not_hold_up_more_tokens_than_a_pipe_takes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = TextDecoder(make_config(model=model))
    texts.fill(group_of(model))
    child = texts._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    long = group_of(model)
    long.prompt_tokens = bytes(4 * 100_000)
    with monkeypatch.context() as patch:
        patch.setattr(text_decoder, "ANSWER_S", 0.2)
        texts.fill(long)
    assert not long.prompt_text
    assert child.poll() is not None
    texts.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_decoder_that_dies_or_hangs_costs_texts_and_is_replaced(
    model: Path, how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = TextDecoder(make_config(model=model))
    texts.fill(group_of(model))
    child = texts._child
    assert child is not None
    os.kill(child.pid, how)
    if how == signal.SIGKILL:
        child.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(text_decoder, "ANSWER_S", 0.2)
        without = group_of(model)
        texts.fill(without)
    assert texts_of(without) == ("", ["", ""])
    assert child.wait(60) == -signal.SIGKILL
    after = group_of(model)
    texts.fill(after)
    assert texts_of(after) == (QUESTION, [ANSWER, ANSWER])
    texts.close()


def test_the_decoder_ends_with_its_parent(model: Path) -> None:
    """Whose end closes the pipe, however it ends."""
    texts = TextDecoder(make_config(model=model))
    texts.fill(group_of(model))
    child = texts._child
    assert child is not None and child.stdin is not None
    child.stdin.close()
    assert child.wait(60) == 0


def test_a_file_that_is_no_tokenizer_is_tried_a_few_times(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "tokenizer.json").write_text("{}")
    texts = TextDecoder(make_config(model=model))
    for _ in range(text_decoder.MOST_FAILURES + 2):
        group = rollout_pb2.Group(prompt_tokens=b"\x03\0\0\0")
        texts.fill(group)
        assert group.prompt_text == ""
    assert caplog.text.count("texts not decoded") == text_decoder.MOST_FAILURES


@pytest.mark.parametrize("path", ["/no/such/model", "someone/no-such-model", "a b c"])
def test_a_controller_without_the_tokenizer_says_so(path: str) -> None:
    texts = TextDecoder(make_config(model=path))
    assert not texts.available
    group = rollout_pb2.Group(prompt_tokens=b"\x03\0\0\0")
    texts.fill(group)
    assert group.prompt_text == ""


def test_a_vocabulary_without_a_tokenizer_file_cannot_be_decoded(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert not TextDecoder(make_config(model=model)).available


def test_a_large_completion_does_not_block_the_pipe(model: Path) -> None:
    texts = TextDecoder(make_config(model=model))
    text = "12345678" * 50_000
    many = Tokenizer.from_file(str(model / "tokenizer.json")).encode("12345678").ids * 50_000
    group = rollout_pb2.Group(
        completions=[rollout_pb2.Completion(tokens=np.array(many, "<i4").tobytes())]
    )
    begun = time.monotonic()
    texts.fill(group)
    assert group.completions[0].text == text, time.monotonic() - begun
    texts.close()
