"""One rollout worker: ``python -P -m rollout_worker CONFIG --controllers HOST:PORT,... --id
rollout-0``.

Exit status: 0 after the run has ended, 2 for bad input (one line on standard error), 3 if the
engine died while it generated, else 1.
"""

from paceline.process.worker_command import worker_command

if __name__ == "__main__":
    worker_command("rollout")
