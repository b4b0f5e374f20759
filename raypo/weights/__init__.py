"""Messages and data of a weight push: buckets, manifests and broadcast groups."""
