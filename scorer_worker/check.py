"""Check of a judge behind a URL: ``python -m scorer_worker.check NAME SETTINGS_JSON`` asks for one
score.

Exit status: 0 if it gave one; else 1, with one line on standard error.
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np

from paceline.config.schema import Config
from paceline.errors import UserError
from scorer_worker.scorer import BadCompletion, Item, NoScore, Unavailable
from scorer_worker.url_judge import UrlJudge


def main() -> int:
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d"}, "scorers": {name: settings}}
    )
    token = np.zeros(1, np.int32)
    item = Item(token, token, prompt="What is 2 + 2?", text="4", answer="4")
    try:
        asyncio.run(UrlJudge(config, name).score([item]))
    except (UserError, BadCompletion, NoScore, Unavailable) as error:
        print(f"check: scorers.{name}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
