"""Put on PYTHONPATH of a fleet under test: SIGUSR1 arms a process to fall at a chosen instant.

Until then nothing in the process is changed; see ``testbed/failpoints.py``.
"""

import os
import signal

if "PACELINE_INSTANTS" in os.environ:

    def _arm(number, frame):
        from testbed.failpoints import arm

        arm()

    signal.signal(signal.SIGUSR1, _arm)
