"""Fixtures of these tests."""

from tests.fixtures.redis_url import url

__all__ = ["url"]
