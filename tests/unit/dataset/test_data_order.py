"""The order of a mixture: shares, epochs of each source, the same everywhere, and cheap at any
size."""

from collections import Counter

import pytest

from paceline.dataset.data_order import BLOCK, DataOrder, DataSource, shares, task_row


def mixture(*rows_and_weights: tuple[int, float], seed: int = 3, shuffle: bool = True) -> DataOrder:
    rows = [rows for rows, _ in rows_and_weights]
    counts = shares([weight for _, weight in rows_and_weights])
    sources = [
        DataSource(f"s{n}", *fields) for n, fields in enumerate(zip(rows, counts, strict=True))
    ]
    return DataOrder(seed, sum(rows), shuffle, tuple(sources))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1, 1], [500, 500]),
        ([0.7, 0.3], [700, 300]),
        ([1, 1, 1], [334, 333, 333]),
        ([1, 1e-9], [999, 1]),
        ([3, 0], [1000, 0]),
        ([1e-9] * 3 + [1e9], [1, 1, 1, 997]),
    ],
)
def test_a_weight_is_the_share_of_a_sources_prompts(
    weights: list[float], expected: list[int]
) -> None:
    assert list(shares(weights)) == expected and sum(expected) == BLOCK


def test_every_thousand_tasks_have_exactly_the_shares_and_any_hundred_about() -> None:
    order = mixture((50, 0.6), (4000, 0.3), (10, 0.1))
    sources = [order.source_of(order.place(n)[1]) for n in range(5000)]
    for start in range(0, 5000, BLOCK):
        assert Counter(sources[start : start + BLOCK]) == {0: 600, 1: 300, 2: 100}
    # Sixty of a hundred, plus or minus five standard deviations of a draw.
    assert all(35 <= sources[n : n + 100].count(0) <= 85 for n in range(0, 5000, 100))


def test_each_source_visits_each_of_its_rows_once_in_each_of_its_epochs() -> None:
    order = mixture((7, 3), (40, 1))
    seen: Counter[tuple[int, int]] = Counter(order.place(n) for n in range(4 * BLOCK))
    assert set(seen.values()) == {1}
    for rows in (range(7), range(7, 47)):
        visited = Counter(epoch for epoch, row in seen if row in rows)
        whole = [epoch for epoch, many in visited.items() if many == len(rows)]
        assert len(whole) >= 24
        for epoch in whole:
            assert {row for e, row in seen if e == epoch and row in rows} == set(rows)


def test_sources_without_weights_are_one_data_set() -> None:
    sources = (DataSource("a", 5), DataSource("b", 11))
    order = DataOrder(4, 16, True, sources)
    assert [order.place(n) for n in range(40)] == [task_row(4, n, 16, True) for n in range(40)]
