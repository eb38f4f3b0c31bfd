"""One scorer worker: ``python -P -m scorer_worker CONFIG --scorer NAME --controllers HOST:PORT,...
--id NAME-0``.

Exit status: 0 after the run has ended or the worker was drained, 2 for bad input (one line on
standard error), else 1.
"""

from paceline.process.worker_command import worker_command

if __name__ == "__main__":
    worker_command("scorer")
