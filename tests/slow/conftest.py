"""Slow tests share the integration tests' Ray."""

from tests.integration.conftest import local_ray

__all__ = ["local_ray"]
