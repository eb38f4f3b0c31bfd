"""A leader that loses its lease knows whether Redis was slow or itself."""

import pytest

from controller.leader import Renewals


class Hands:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


def renewals_of(*rounds: tuple[float, float, bool], lease_s: float = 1.0) -> str:
    """Seconds of a pause, of a call, and whether it renewed; a quarter of the lease was wanted."""
    clock = Hands()
    renewals = Renewals(clock, lease_s)
    for pause_s, call_s, renewed in rounds:
        renewals.begin()
        clock.now += pause_s
        renewals.paused(lease_s / 4)
        renewals.begin()
        clock.now += call_s
        renewals.asked(renewed=renewed)
    return renewals.why_late()


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ([(0.25, 0.9, False), (0.25, 0.4, False)], "Redis did not answer for 1.3 s"),
        ([(3.25, 0.1, False)], "its process did not run for 3.0 s"),
        # What was slow before the last renewal has cost nothing.
        ([(3.25, 2.0, True), (0.25, 0.1, False)], ""),
        # Somebody took the lease: neither was slow.
        ([(0.25, 0.0, False)], ""),
    ],
)
def test_the_slower_of_the_two_is_named(rounds: list[tuple[float, float, bool]], said: str) -> None:
    assert renewals_of(*rounds) == (said and f"{said}, and the lease has 1 s")
