"""Stop strings are found whatever the tokens they are made of, and cost nothing elsewhere."""

from collections.abc import Sequence

import numpy as np
import pytest

from rollout_worker.engine.stopping import TokenTexts, begun, ended_by

PIECES = ["a", "b", "</", "answer", ">", "\n", "é\n", "�", "", "> end"]


def decode(tokens: Sequence[int]) -> str:
    return "".join(PIECES[t] for t in tokens)


def may_end(*stops: str) -> list[bool]:
    texts = TokenTexts(decode, len(PIECES))
    return [texts.may_end(token, stops) for token in range(len(PIECES))]


def test_a_stop_string_over_several_tokens_is_found_when_its_last_token_comes() -> None:
    tokens = np.array([0, 1, 2, 3, 4], dtype=np.int32)
    assert may_end("</answer>")[4]
    assert ended_by(("</answer>",), tokens, decode) == "</answer>"
    assert ended_by(("</answer>",), tokens[:-1], decode) is None
    assert ended_by((">", "</answer>"), tokens, decode) == "</answer>", "the earliest counts"
    # It may end inside of a token.
    assert may_end("</answer>")[9]
    assert ended_by(("</answer>",), np.array([2, 3, 9], dtype=np.int32), decode) == "</answer>"


def test_a_long_completion_is_not_decoded_whole() -> None:
    seen: list[int] = []

    def counting(tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return decode(tokens)

    tokens = np.array([0] * 5000 + [0, 1], dtype=np.int32)
    assert ended_by(("ab",), tokens, counting) == "ab"
    assert max(seen) < 10


def test_a_stop_string_that_ends_with_a_blank_looks_at_every_token() -> None:
    assert all(may_end("a "))


@pytest.mark.parametrize(
    ("tokens", "stops", "most"),
    [
        ([0, 2, 3], ("</answer>",), 1),
        ([0, 2], ("</answer>", "b"), 7),
        ([0], ("</answer>",), 0),
        ([0], (), 0),
        ([0, 7], ("aé",), 3),  # the first half of a character
        ([0, 7], ("b",), 1),
    ],
)
def test_a_stop_string_that_has_begun_is_looked_for_in_as_few_tokens_as_it_needs(
    tokens: list[int], stops: tuple[str, ...], most: int
) -> None:
    assert begun(stops, np.array(tokens, dtype=np.int32), decode) == most
