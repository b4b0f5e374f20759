"""Preflight checks of `raypo doctor`: the machine, the cluster's nodes, and a run's inputs."""
