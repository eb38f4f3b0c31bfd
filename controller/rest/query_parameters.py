"""Query parameters that several requests of the REST interface have, with their limits. Apart from
the schemas: a leader uses those without the web framework, which takes a second to import."""

import re
from typing import Annotated

from fastapi import Query
from pydantic import BeforeValidator

MOST_STEP = 1 << 53


def _whole(text: object) -> object:
    """Pydantic reads "0.0" as 0, which the published schema does not allow."""
    if isinstance(text, str) and not re.fullmatch(r"-?[0-9]+", text):
        raise ValueError("give a whole number, such as 12")
    return text


WholeNumber = Annotated[int, BeforeValidator(_whole)]
StepNumber = Annotated[WholeNumber, Query(ge=0, le=MOST_STEP)]
SearchText = Annotated[
    str,
    Query(
        min_length=1,
        max_length=256,
        description="Only groups with this text in the prompt or in a completion, in any case. "
        "The sample archive is searched: a trained group is in it after a minute at most.",
    ),
]
Reward = Annotated[float, Query(allow_inf_nan=False)]
