"""Memory of the language-model head, by arithmetic: tokens of a chunk, and scratch of a row."""

from __future__ import annotations

MIB = 1 << 20
DEFAULT_CHUNK_MB = 128
"""MiB of float32 logits."""


def tokens_per_chunk(vocabulary: int, chunk_mb: float) -> int:
    """Tokens whose float32 logits fill at most ``chunk_mb`` MiB; at least one."""
    return max(1, int(chunk_mb * MIB) // (4 * vocabulary))


def head_scratch_bytes(
    tokens: int, hidden: int, vocabulary: int, chunk_mb: float, *, entropy_gradient: bool = False
) -> int:
    """Most bytes that scoring ``tokens`` targets of a row and its backward pass hold beside the
    weights and their gradients, for a head [vocabulary, hidden] in float32, at any temperature and
    also under autocast to bfloat16.

    Four times the logits of a chunk, five with the gradient of the entropy (counted on float32 and
    bfloat16). With several chunks, the gradient of the head is held for one more of them, to be
    added to the sum. A bound: the two do not peak at once. Caps and scales of logits (Gemma,
    Cohere, Granite) are not in it, nor are sharded heads.
    """
    chunk = min(tokens, tokens_per_chunk(vocabulary, chunk_mb))
    logits = (5 if entropy_gradient else 4) * chunk * vocabulary * 4
    return logits + (vocabulary * hidden * 4 if chunk < tokens else 0)
