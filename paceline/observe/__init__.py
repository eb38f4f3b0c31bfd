"""Observation of a run: its events, curves, faults and samples, for people and their tools.

    journal entries (leader, standby, audit) ──┐
    events.jsonl (CLI, runs that are over) ────┴─► projection ─► REST, page, CLI, console, summary

- ``projection.Projection`` folds every event once. ``take`` adds a durable journal entry, ``read``
  a run directory; ``history``, ``metrics``, ``evals`` and ``totals`` are its results.
- In a controller ``controller.projector.Projector`` keeps it in a thread of its own:
  ``await projector.ask(lambda run: run.history.checkpoints)``.
- ``run_files`` writes the run's files behind the leader's journal; sinks and alerts
  take the same records. No process reads a file again that it writes.
- ``vocabulary`` has the words for types, severity and causes that ledger and readers share.
"""
