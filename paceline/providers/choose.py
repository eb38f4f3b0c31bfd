"""Choice of the leader's provider, by ``fleet.provider``."""

from __future__ import annotations

from paceline.config.schema import Config
from paceline.providers.base import Drain, Provider


def leader_provider(config: Config, run_dir: str, drain: Drain) -> Provider | None:
    """The leader's provider; None for local, which runs in the supervisor."""
    match config.fleet.provider:
        case "kubernetes":
            from paceline.providers.kubernetes import KubernetesProvider

            return KubernetesProvider(config.kubernetes)
        case "ray":
            from paceline.providers.ray import RayProvider

            return RayProvider(config, run_dir, drain)
        case "none":
            from paceline.providers.none import NoProvider

            return NoProvider(drain)
    return None
