"""``paceline status``."""

from __future__ import annotations

from paceline.cli.common import JsonOption, Target, print_json, takes_target

ANSWER_LIMIT_S = 3.0


@takes_target
def status(target: Target, as_json: JsonOption = False) -> None:
    """Show the state of a run: every process, the leader and its term, step and queue.

    Example: paceline status --run-dir runs/demo --json
    """
    from paceline.cli.messages import as_dict
    from paceline.run_view.event_follower import leader_status

    reply = target.ask(lambda control: leader_status(control, ANSWER_LIMIT_S))
    if as_json:
        print_json(as_dict(reply))
        return
    from paceline.console.status_tables import fleet_table, headline, progress_table
    from paceline.console.terminal import out_console

    console = out_console()
    console.print(headline(reply), markup=False, highlight=False)
    console.print(progress_table(reply))
    console.print(fleet_table(reply))
    for one in reply.controllers:
        if one.rest and one.state != "silent":
            line = f"dashboard ({one.controller_id}): {one.rest}"
            console.print(line, markup=False, highlight=False)
