"""Routes as they travel: the experts that each token went to, beside the tokens of a group."""

import zlib

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UserError

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
