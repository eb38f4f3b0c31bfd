"""Memory of the language-model head, by arithmetic: tokens of a chunk, and the peak of a row."""

from __future__ import annotations

MIB = 1 << 20
DEFAULT_CHUNK_MB = 128
"""MiB of float32 logits."""


def tokens_per_chunk(vocabulary: int, chunk_mb: float) -> int:
    """Tokens whose float32 logits fill at most ``chunk_mb`` MiB; at least one."""
    return max(1, int(chunk_mb * MIB) // (4 * vocabulary))


def head_peak_bytes(
    tokens: int,
    hidden: int,
    vocabulary: int,
    chunk_mb: float = DEFAULT_CHUNK_MB,
    *,
    entropy_gradient: bool = False,
) -> int:
    """Most bytes that scoring ``tokens`` targets of a row and its backward pass hold beside the weights, for a head
    [vocabulary, hidden] in float32, at any temperature and also under autocast to bfloat16.

    Four times the logits of a chunk, five with the gradient of the entropy (counted on float32 and bfloat16), and the
    gradient of the head: twice if there are several chunks, because each one's is added to the sum. A bound: with several
    chunks the two parts do not peak at once. Caps and scales of logits (Gemma, Cohere, Granite) are not in it, nor are
    sharded heads.
    """
    chunk = min(tokens, tokens_per_chunk(vocabulary, chunk_mb))
    logits = (5 if entropy_gradient else 4) * chunk * vocabulary * 4
    gradients = 1 if chunk == tokens else 2
    return logits + gradients * vocabulary * hidden * 4
