"""Size of a bucket. Without torch, for `raypo plan`."""

BUCKET_BYTES = 256 * 1024**2
"""Bytes of weights in a bucket of a push."""
