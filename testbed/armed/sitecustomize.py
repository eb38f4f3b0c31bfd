"""Signal handler of a fleet under test: SIGUSR1 arms a process to fall at a chosen instant.

It is loaded by way of PYTHONPATH. Until the signal nothing in the process is changed; see
``testbed/faults/failpoints.py``.
"""

import os
import signal
from types import FrameType

if "PACELINE_INSTANTS" in os.environ:

    def _arm(number: int, frame: FrameType | None) -> None:
        from testbed.faults.failpoints import arm

        arm()

    signal.signal(signal.SIGUSR1, _arm)
