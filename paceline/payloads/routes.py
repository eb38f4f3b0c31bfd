"""Routes as they travel: the experts that each token went to, beside the tokens of a group."""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UserError
from paceline.v1 import rollout_pb2

UNKNOWN = 0xFFFF
"""Route of a token that nobody noted: it is routed as it comes."""
Routes = NDArray[np.uint16]


class BadRoutes(UserError, ValueError):
    """Routes that do not fit their tokens or the model."""


def encoded(routes: Routes) -> bytes:
    """``routes`` [tokens, width], compressed. width: layers with experts times experts a token."""
    return zlib.compress(np.ascontiguousarray(routes, "<u2").tobytes(), 1)


def decoded(data: bytes, tokens: int, width: int) -> Routes:
    """[tokens, width] from ``encoded``; unknown ones if it is empty. Raises BadRoutes."""
    if not data:
        return np.full((tokens, width), UNKNOWN, np.uint16)
    size = 2 * tokens * width
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(data, size + 1)  # a bomb ends here
    except zlib.error as error:
        raise BadRoutes(f"routes are no zlib stream ({error})") from error
    if len(raw) != size:
        raise BadRoutes(f"routes of {tokens} tokens do not have {width} experts a token")
    return np.frombuffer(raw, "<u2").reshape(tokens, width)


def note_routes(
    group: rollout_pb2.Group, prompt: Routes, completions: Sequence[Routes | None]
) -> None:
    """Puts the routes of the prompt's tokens and of each completion's into ``group``."""
    group.routes_width, group.prompt_routes = prompt.shape[1], encoded(prompt)
    for completion, routes in zip(group.completions, completions, strict=True):
        completion.routes = b"" if routes is None else encoded(routes)


def routes_of(group: rollout_pb2.Group, width: int) -> tuple[Routes, Routes]:
    """[P, width] of the prompt's tokens, and [C, width] of all completions'. Raises BadRoutes."""
    completions = [decoded(c.routes, len(c.tokens) // 4, width) for c in group.completions]
    prompt = decoded(group.prompt_routes, len(group.prompt_tokens) // 4, width)
    return prompt, np.concatenate(completions)
