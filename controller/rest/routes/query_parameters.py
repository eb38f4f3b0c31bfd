"""Query parameters that several requests of the REST interface have, with their limits.

Apart from the schemas: a leader uses those without the web framework, which takes a second to import.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

MOST_STEP = 1 << 53
StepNumber = Annotated[int, Query(ge=0, le=MOST_STEP)]
SearchText = Annotated[
    str,
    Query(
        min_length=1,
        max_length=256,
        description="Only groups with this text in the prompt or in a completion, in upper or lower case. "
        "The sample archive is searched: a trained group is in it after a minute at most.",
    ),
]
Reward = Annotated[float, Query(allow_inf_nan=False)]
