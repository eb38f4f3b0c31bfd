"""Identifier types: ints and strings that a type checker keeps apart."""

from typing import NewType

TaskId = NewType("TaskId", str)
"""One prompt occurrence of a run: training tasks and evaluation tasks share the space."""

Version = NewType("Version", int)
"""A published state of the policy weights. Rises over the whole run, also across rollbacks."""

Step = NewType("Step", int)
"""A committed optimizer step, from 1; 0 is the initial state. Falls only in a rollback."""

MeshEpoch = NewType("MeshEpoch", int)
"""One formation of a process group. Only rises."""

ANY = 1 << 40
"""A limit above every number of tokens, versions and steps."""


def stored_version(name: str) -> Version:
    """The version of the stored weights of this name, or with this prefix; -1 if it is empty."""
    return Version(int(name.partition("-")[0] or -1))
