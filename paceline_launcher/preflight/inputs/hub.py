"""Reachability of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline_launcher.preflight.deadline import NoAnswer, read_in_time

HUB_S = 5.0
CHECK_HUB = (
    "Check HF_ENDPOINT and the network to the hub, or give a directory or file of this machine"
)


def hub_silence(ask: Callable[[Any, float], object]) -> str:
    """Why the hub does not answer ``ask(HfApi, seconds)``; empty if it answers.

    Raises HfHubHTTPError, which is an answer too, if ``ask`` does.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return ""
    hub = f"the hub {constants.ENDPOINT}"
    try:
        # The client's own limit is one of each read: a hub that sends a byte now and then meets no
        # limit.
        read_in_time(hub, lambda: ask(HfApi(), HUB_S), limit_s=2 * HUB_S)
    except HfHubHTTPError:
        raise
    except NoAnswer as error:
        return error.found
    except Exception as error:  # whatever the HTTP client raises for an unreachable hub
        return f"{hub} does not answer: {str(error).partition(chr(10))[0]}"
    return ""


@contextmanager
def only_cache() -> Iterator[None]:
    """Meanwhile this process reads the hub's files from its cache and asks no hub."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
