"""torchrun's environment: a process's place among the ranks of a job that runs on one host or
several.

torchrun sets it, and so do other launchers of PyTorch jobs. A policy replica takes it as its own
ranks'. Imports nothing slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import BadInput

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MASTER = ("MASTER_ADDR", "MASTER_PORT")
_REMEDY = (
    "Start every rank with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
    "MASTER_PORT as it does; to have Paceline start the ranks on this host, unset RANK, WORLD_SIZE "
    "and LOCAL_RANK"
)


@dataclass(frozen=True, slots=True)
class TorchrunPlace:
    """A rank of a replica whose ranks were started from outside."""

    rank: int  # among all ranks, from 0
    size: int  # number of ranks on all hosts
    local_rank: int  # among those of its host, from 0: the number of its device
    master: str  # address of rank 0's host, the same text on every rank
    port: int  # port of the key-value store, at `master`
    agent_store: bool  # the launcher serves the store; otherwise rank 0 does
    attempt: str  # different for each start of the ranks by one launcher


def torchrun_place(environ: Mapping[str, str], ranks: int) -> TorchrunPlace | None:
    """The place that ``environ`` gives this process; None if none of RANK, WORLD_SIZE and
    LOCAL_RANK is set. ``ranks``: fleet.policy_ranks. Raises BadInput if the variables are
    incomplete, contradict one another, or contradict ``ranks``."""
    if not any(environ.get(name) for name in PLACE):
        return None
    if missing := [name for name in (*PLACE, *MASTER) if not environ.get(name)]:
        given = ", ".join(f"{n}={environ[n]}" for n in (*PLACE, *MASTER) if environ.get(n))
        raise BadInput(f"the environment has {given}, but no {' and no '.join(missing)}. {_REMEDY}")
    rank, size, local_rank = (whole_number(environ, name, _REMEDY) for name in PLACE)
    if not local_rank <= rank < size:
        raise BadInput(
            f"RANK={rank}, LOCAL_RANK={local_rank} and WORLD_SIZE={size} contradict one another. "
            f"{_REMEDY}"
        )
    port = port_number(environ, "MASTER_PORT", _REMEDY)
    if size != ranks:
        raise BadInput(
            f"WORLD_SIZE={size}, but fleet.policy_ranks = {ranks}: a replica consists of that many "
            f"ranks. Set fleet.policy_ranks = {size} for the whole run, or start {ranks} ranks"
        )
    return TorchrunPlace(
        rank=rank,
        size=size,
        local_rank=local_rank,
        master=environ["MASTER_ADDR"],
        port=port,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt="/".join(
            environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")
        ),
    )


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for a process that a launcher started by torchrun starts itself: it is not a rank
    of that job."""
    return {name: value for name, value in environ.items() if name not in PLACE}


def whole_number(environ: Mapping[str, str], name: str, remedy: str) -> int:
    """Value of ``name``. Raises BadInput, with ``remedy``, if it is no whole number."""
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        hint = " An elastic range has no fixed number of nodes." if ":" in text else ""
        raise BadInput(f"{name}={text!r} is not a whole number from 0.{hint} {remedy}")
    return int(text)


def port_number(environ: Mapping[str, str], name: str, remedy: str) -> int:
    port = whole_number(environ, name, remedy)
    if not 0 < port < 65536:
        raise BadInput(f"{name}={port}: a port is between 1 and 65535. {remedy}")
    return port
