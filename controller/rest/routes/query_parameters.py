"""Query parameters that several requests of the REST interface have, with their limits.

Apart from the schemas: a leader uses those without the web framework, which takes a second to import.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

MOST_STEP = 1 << 53
StepNumber = Annotated[int, Query(ge=0, le=MOST_STEP)]
Reward = Annotated[float, Query(allow_inf_nan=False)]
