"""Slow tests share the integration tests' Ray."""

from tests.integration.conftest import first, local_ray, task

__all__ = ["first", "local_ray", "task"]
