"""Observation of a run: its events, curves, faults and samples, for people and their tools.

    journal entries (leader, standby, audit) ──┐
    events.jsonl (CLI, runs that are over) ────┴─► projection ─► REST, page, CLI, console, summary

- ``projection`` folds every event once: into ``event_history``, ``checkpoints``, ``curves``,
  ``held_out``, and the totals ``coverage``, ``faults`` and ``groups``. A controller keeps it in a
  thread of its own.
- A leader writes ``run_files``, ``checkpoints`` and ``samples``, and feeds ``sinks``, each from a
  thread of its own. No process reads a file again that it writes.
- Others read a run's directory by ``runs``, ``file_tail`` and ``fleet_file``, and a running fleet
  by ``run_watcher``. ``vocabulary`` has the words that ledger and readers share.
"""
