"""Capacity planner: the pace of a run on numbers of GPUs that are not there yet.

python -m testbed.planner run.toml --gpus 16,32,64,128 --gpu h100
"""

import sys

import typer

from paceline.errors import UserError
from testbed.planner.command import pace

app = typer.Typer(add_completion=False)
app.command()(pace)

if __name__ == "__main__":
    try:
        app(prog_name="python -m testbed.planner")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
