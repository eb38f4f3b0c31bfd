"""Bytes on a weights link: greeting, manifest, shares, buckets, deltas, checksums."""
