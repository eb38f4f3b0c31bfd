"""A worker's side of the turns at a device that two workers share (fleet.sharing).

    Seat {grant, hold}    ──► begins(): occupy ──► reported: (grant, parked = false)
    Seat {grant}, no hold ──► park ──► ends() ──► reported: (grant, parked = true)

A worker that has parked under a grant never uses the device under it again, whatever an older
directive says: another worker may have it by then. A grant that was asked for before it was taken
is given back as it is. Every later grant has a higher number.
"""

from dataclasses import dataclass

from paceline.v1 import worker_pb2


@dataclass(slots=True)
class Turn:
    grant: int = 0
    """Grant of the newest directive that was followed; 0: the device was never this worker's."""
    parked: bool = True
    _returned: int = 0
    """The newest grant that was given back."""

    def may_begin(self, seat: worker_pb2.Seat) -> bool:
        """True if the device is this worker's."""
        return seat.hold and seat.grant > self._returned

    def begins(self, seat: worker_pb2.Seat) -> bool:
        """Notes that the turn begins, or goes on, if it is this worker's. To be reported before the
        device is used. False: the worker has to be parked."""
        if self.may_begin(seat):
            self.grant, self.parked = seat.grant, False
            return True
        return False

    def ends(self, seat: worker_pb2.Seat) -> None:
        """The worker has parked, and follows ``seat``."""
        self.grant = self._returned = max(self.grant, seat.grant)
        self.parked = True

    @property
    def report(self) -> worker_pb2.SeatReport:
        return worker_pb2.SeatReport(grant=self.grant, parked=self.parked)
