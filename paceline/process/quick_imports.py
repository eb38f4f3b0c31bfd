"""Quick imports of large packages: without garbage collection, which finds no garbage in them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """For the imports of torch and transformers, which make a million objects that stay.

    The collector would look at all of them a dozen times meanwhile: a fifth of a worker's start. They
    are left out of its later rounds, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
