"""Check of one recorded row, as a rollout worker encodes it.

    python -P -m paceline.recorded.check CONFIG_AS_JSON < ROW_AS_JSON

Prints the row as the model reads it, with what is trained marked. Exit status 2, with one line on
standard error, if the row would be dropped.
"""

from __future__ import annotations

import argparse
import json
import sys

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.process.lifetime import leave_after
from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer
from paceline.recorded.encoding import RowEncoder
from paceline.recorded.preview import row_text


def main() -> int:
    parser = argparse.ArgumentParser(prog="paceline.recorded.check", description=__doc__)
    parser.add_argument("config", type=Config.model_validate_json, help="of the run, as JSON")
    config = parser.parse_args().config
    tokenizer = PromptTokenizer(config)
    try:
        row = RowEncoder(config, tokenizer).encode(json.load(sys.stdin))
    except BadPrompt as error:
        raise BadInput(f"the first row would be dropped ({error.reason}): {error}") from None
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # whatever the locale is
    print(row_text(row, tokenizer.decode_all))
    return 0


if __name__ == "__main__":
    leave_after(main, "check")
