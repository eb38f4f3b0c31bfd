"""Configuration of a run: schema, loader, TOML output and templates."""

from paceline.config.load import ConfigError, fleet_digest, load_config, to_toml
from paceline.config.schema import Config

__all__ = ["Config", "ConfigError", "fleet_digest", "load_config", "to_toml"]
