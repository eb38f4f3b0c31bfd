"""Stop strings are found whatever the tokens they are made of, and cost nothing elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout_worker.engine.stopping import EndTokens, StopStrings, TokenTexts

PIECES = ["a", "b", "</", "answer", ">", "\n", "é\n", "�", "", "> end"]


def decode(tokens: Sequence[int]) -> str:
    return "".join(PIECES[t] for t in tokens)


def test_a_stop_string_over_several_tokens_is_found_when_its_last_token_comes() -> None:
    stops = StopStrings(("</answer>",), decode, len(PIECES))
    tokens = np.array([0, 1, 2, 3, 4], dtype=np.int32)
    assert stops.may_end(np.array([4]))[0]
    assert stops.found(tokens) == "</answer>"
    assert stops.found(tokens[:-1]) is None


def test_a_stop_string_may_end_inside_a_token() -> None:
    stops = StopStrings(("</answer>",), decode, len(PIECES))
    assert stops.may_end(np.array([9]))[0]
    assert stops.found(np.array([2, 3, 9], dtype=np.int32)) == "</answer>"


def test_only_tokens_that_can_end_a_stop_string_are_looked_at() -> None:
    stops = StopStrings(("ab",), decode, len(PIECES))
    assert stops.may_end(np.arange(len(PIECES))).tolist() == [
        *[False, True, False, False, False, False, False],
        *[True, True, False],
    ]


def test_the_earliest_of_several_stop_strings_counts() -> None:
    stops = StopStrings((">", "</answer>"), decode, len(PIECES))
    assert stops.found(np.array([2, 3, 4], dtype=np.int32)) == "</answer>"


def test_a_long_completion_is_not_decoded_whole() -> None:
    seen: list[int] = []

    def counting(tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return decode(tokens)

    stops = StopStrings(("ab",), counting, len(PIECES))
    assert stops.found(np.array([0] * 5000 + [0, 1], dtype=np.int32)) == "ab"
    assert max(seen) < 10


def test_new_stop_strings_do_not_decode_the_vocabulary_again() -> None:
    decoded: list[int] = []

    def counting(tokens: Sequence[int]) -> str:
        decoded.extend(tokens)
        return decode(tokens)

    texts = TokenTexts(counting, len(PIECES))
    tables = [
        StopStrings((f"{n}>", last), counting, len(PIECES), texts).may_end(np.arange(len(PIECES)))
        for n, last in enumerate("abé")
    ]
    assert decoded == list(range(len(PIECES)))
    alone = StopStrings(("2>", "é"), decode, len(PIECES)).may_end(np.arange(len(PIECES)))
    assert tables[2].tolist() == alone.tolist()
    assert tables[2].tolist() == [
        *[False, False, False, False, True, False],
        *[True, True, True, True],
    ]


def test_a_stop_string_that_ends_with_a_blank_looks_at_every_token() -> None:
    assert StopStrings(("a ",), decode, len(PIECES)).may_end(np.arange(len(PIECES))).all()


def test_end_tokens_outside_the_vocabulary_are_ignored() -> None:
    ends = EndTokens([2, 99, -1], 5)
    assert ends(np.array([0, 2, 4])).tolist() == [False, True, False]
