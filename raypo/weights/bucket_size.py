"""Size of a bucket. `raypo plan` imports this module, so it must not import torch."""

BUCKET_BYTES = 256 * 1024**2
"""Default size of a push's buckets, in bytes."""
