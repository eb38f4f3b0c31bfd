"""Check of GPU placement: whether each worker of a fleet on this machine has GPUs of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline.config.schema import Config
from paceline.node_placement import gpus_needed, local_placement
from paceline.preflight.check import Check, ok, warn
from paceline.process.job.visible_gpus import visible_gpus

NAME = "GPU placement"


def gpu_placement(config: Config, environ: Mapping[str, str]) -> Iterator[Check]:
    """Nothing if workers compute on CPUs, or are started elsewhere."""
    seen = () if config.model.device == "cpu" else visible_gpus(environ)
    if not seen or config.fleet.provider != "local":
        return
    placement = local_placement(config, len(seen))
    if placement is None:
        yield warn(
            NAME,
            f"the workers of [fleet] need {gpus_needed(config)} GPUs, and this machine has {len(seen)}: all of them share what "
            "there is",
            "Lower fleet.policy or fleet.rollout, or start the run on several machines with `paceline node`",
        )
        return
    places = placement.on(0)
    given = "; ".join(
        f"{name} {','.join(seen[number] for number in place.gpus)}"
        for name, place in places.items()
        if place.gpus
    )
    yield ok(NAME, f"GPUs by worker: {given}")
