"""Redis servers under test."""
