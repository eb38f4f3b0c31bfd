"""Configuration of a run: schema, loader, TOML output and templates."""

from paceline.config.errors import ConfigError
from paceline.config.load import fleet_digest, load_config
from paceline.config.schema import Config
from paceline.config.toml import to_toml

__all__ = ["Config", "ConfigError", "fleet_digest", "load_config", "to_toml"]
