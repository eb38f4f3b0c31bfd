"""Curriculum: how often each row was always or never solved of late, and whether its next turn is
left out. All of it follows from journalled groups: every replay leaves out the same rows.

A group whose rewards are all equal has no advantage, so nothing is learnt from it. Each such group
in a row halves the probability that the row's next turn is taken, down to a minimum; a group with
different rewards makes it 1 again.
"""

from dataclasses import dataclass, field

from controller.ledger.specs import GroupMeta
from paceline.dataset.data_order import mix

_SOLVED = 0x80  # Bit of a row's byte: the equal rewards were above 0
_COUNT = 0x7F  # Bits of a row's byte: groups in a row whose rewards were equal, at most this number
_DRAW = 0x6375727269  # Keeps the numbers that are drawn here apart from those of the data order


@dataclass(slots=True)
class Curriculum:
    measured: bytearray = field(default_factory=bytearray)
    """One byte a row, as far as measured; 0: unknown, or the newest rewards differed."""
    always: int = 0  # Rows whose newest group had equal rewards above 0
    never: int = 0  # Rows whose newest group had equal rewards of at most 0

    def measure(self, row: int, group: GroupMeta) -> None:
        """``group`` is the newest one of ``row``."""
        if row >= len(self.measured):
            # In steps: to grow by a byte for each row would copy them all each time.
            self.measured.extend(bytes(row + 1 - len(self.measured) + row // 8))
        before, after = self.measured[row], 0
        if group.reward_std == 0.0:
            same = bool(before & _SOLVED) == (group.reward_mean > 0)
            count = min(_COUNT, (before & _COUNT) + 1 if same else 1)
            after = count | (_SOLVED if group.reward_mean > 0 else 0)
        self.measured[row] = after
        self.always += bool(after & _SOLVED) - bool(before & _SOLVED)
        self.never += (0 < after < _SOLVED) - (0 < before < _SOLVED)

    def probability(self, row: int, minimum: float) -> float:
        """Probability that the next turn of ``row`` is taken."""
        count = self.measured[row] & _COUNT if row < len(self.measured) else 0
        return max(minimum, 0.5**count)

    def leaves_out(self, row: int, ordinal: int, seed: int, minimum: float) -> bool:
        """True if the turn of ``row`` with the number ``ordinal`` is left out."""
        taken = self.probability(row, minimum)
        return taken < 1 and mix(seed, _DRAW, ordinal) >= int(taken * 2**64)
