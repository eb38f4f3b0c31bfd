"""Configuration: the schema and how a TOML file with overrides becomes one."""

from paceline.config.schema import Config

__all__ = ["Config"]
