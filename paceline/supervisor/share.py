"""Share of one node in a run: its workers, and the GPUs that each of them sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.node_placement import Placement, local_placement
from paceline.process.job.visible_gpus import VARIABLE, visible_gpus


@dataclass(frozen=True, slots=True)
class Share:
    """``node``: this one."""

    node: int
    placement: Placement
    gpus: tuple[str, ...] = ()
    """Names of this node's GPUs, as CUDA_VISIBLE_DEVICES takes them."""

    def devices(self, pool: str, index: int) -> dict[str, str]:
        """Variables that show a worker its GPUs and no others. Without GPUs there is nothing to say."""
        whole = self.placement.of(pool, index)
        place = whole.part_on(self.node) if whole is not None else None
        if place is None or not self.gpus:
            return {}
        return {VARIABLE: ",".join(self.gpus[number] for number in place.gpus)}

    def takes(self, pool: str, index: int) -> bool:
        place = self.placement.of(pool, index)
        return place is not None and place.node == self.node


def share_of_machine(config: Config, environ: Mapping[str, str]) -> Share | None:
    """Of a fleet that is on this machine alone. None: its workers see all GPUs, because there are too few or none."""
    gpus = () if config.model.device == "cpu" else visible_gpus(environ)
    placement = local_placement(config, len(gpus))
    return Share(0, placement, gpus) if placement is not None else None
