"""Slow tests share the integration tests' Ray."""

from tests.integration.conftest import few_objects, first, group, local_ray, model, task

__all__ = ["few_objects", "first", "group", "local_ray", "model", "task"]
