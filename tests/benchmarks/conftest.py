"""Benchmarks share the integration tests' Ray."""

from tests.integration.conftest import local_ray, task

__all__ = ["local_ray", "task"]
