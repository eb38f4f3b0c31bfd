"""Fleets under test, from a few controllers to one under ``paceline up``."""
