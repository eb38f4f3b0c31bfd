"""State of a process as the kernel sees it."""

from dataclasses import dataclass
from pathlib import Path

_WORDS = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible wait",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead, not reaped",
}


@dataclass(frozen=True, slots=True)
class KernelState:
    letter: str

    @property
    def stopped(self) -> bool:
        """By SIGSTOP, SIGTSTP or a debugger: none of its instructions run."""
        return self.letter in ("T", "t")

    @property
    def uninterruptible(self) -> bool:
        """Waits for a device or a file server; no signal ends it."""
        return self.letter == "D"

    @property
    def words(self) -> str:
        """ "stopped (SIGSTOP); continue it with: kill -CONT PID" without the remedy."""
        return _WORDS.get(self.letter, f"in state {self.letter}")


def kernel_state(pid: int, root: Path = Path("/proc")) -> KernelState | None:
    """State of a process of this machine; None if there is none, or the system has no /proc."""
    try:
        # The name may contain spaces and brackets; the state is the first field after the last
        # bracket.
        letter = (root / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    return KernelState(letter)
