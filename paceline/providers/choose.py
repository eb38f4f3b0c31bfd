"""Which provider the leader runs."""

from __future__ import annotations

from paceline.config.schema import Config
from paceline.providers.base import Drain, Provider


def leader_provider(config: Config, run_dir: str, drain: Drain) -> Provider | None:
    """The provider of ``fleet.provider``; None for local, whose supervisor is its own process."""
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
