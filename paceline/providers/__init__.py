"""Providers of worker processes: Kubernetes, Ray, or none. `paceline up` is its own provider."""

from __future__ import annotations

from paceline.config.schema import Config
from paceline.providers.base import Drain, Provider, Trouble

__all__ = ["Drain", "Provider", "Trouble", "leader_provider"]


def leader_provider(config: Config, run_dir: str, drain: Drain) -> Provider | None:
    """The leader's provider; None for local, whose supervisor starts and ends the processes."""
    match config.fleet.provider:
        case "kubernetes":
            from paceline.providers.kubernetes import KubernetesProvider

            return KubernetesProvider(config.kubernetes)
        case "ray":
            from paceline.providers.ray import RayProvider

            return RayProvider(config, run_dir, drain)
        case "none":
            from paceline.providers.base import NoProvider

            return NoProvider(drain)
    return None
