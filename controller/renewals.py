"""Renewals of a leader's lease: how long they took, and so why the lease ran out although the
leader lived."""

from dataclasses import dataclass

from controller.runtime import Clock


@dataclass(slots=True)
class Renewals:
    """Times since the last renewal that went through, in seconds."""

    clock: Clock
    lease_s: float
    asked_s: float = 0.0  # In calls to Redis
    overslept_s: float = 0.0  # Beyond the pauses between the calls: the process did not run
    _began: float = 0.0

    def begin(self) -> None:
        self._began = self.clock.monotonic()

    def paused(self, wanted_s: float) -> None:
        self.overslept_s += max(0.0, self.clock.monotonic() - self._began - wanted_s)

    def asked(self, *, renewed: bool) -> None:
        if renewed:
            self.asked_s = self.overslept_s = 0.0
        else:
            self.asked_s += self.clock.monotonic() - self._began

    def why_late(self) -> str:
        """Reason why the lease ran out; empty if neither Redis nor this process was slow for half
        of it."""
        if max(self.asked_s, self.overslept_s) < self.lease_s / 2:
            return ""
        why = f"its process did not run for {self.overslept_s:.1f} s"
        if self.asked_s >= self.overslept_s:
            why = f"Redis did not answer for {self.asked_s:.1f} s"
        return f"{why}, and the lease has {self.lease_s:g} s"
