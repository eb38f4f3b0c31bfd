"""Providers of worker processes: local, Kubernetes, Ray, or none."""

from __future__ import annotations

from paceline.providers.base import Drain, Provider, Trouble
from paceline.providers.choose import leader_provider

__all__ = ["Drain", "Provider", "Trouble", "leader_provider"]
