"""Data types and messages of a weight push: buckets, manifests and broadcast groups."""
