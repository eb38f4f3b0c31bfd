"""``paceline samples``."""

from __future__ import annotations

import contextlib
import json
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter

from paceline.errors import BadInput, RefusalCode, Unreachable, plural
from paceline_launcher.cli.common import JsonOption, Target, print_json
from paceline_launcher.terminal import printable

if TYPE_CHECKING:
    from paceline.rpc.client import ControlPlane

ANSWER_S = 10.0  # a search of the whole archive
MOST_TEXT = 256  # that controllers search for
Sort = StrEnum("Sort", ["recent", "oldest", "best", "worst", "longest", "stalest"])
ORDER = {"best": "-reward", "worst": "reward", "longest": "-length", "stalest": "-staleness"}
"""Names of the controllers that differ."""


def samples(
    *,
    target: Target,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 5,
    step: Annotated[int | None, typer.Option(min=1)] = None,
    row: Annotated[int | None, typer.Option(min=0)] = None,
    grep: str | None = None,
    sort: Sort = Sort.recent,
    as_json: JsonOption = False,
) -> None:
    """Print recent prompts, their completions, and the reward of each.

    Samples that a checkpoint covers, and those of a run that is not running, come from the run's
    archive (settings under `archive`): it keeps the newest ones within its size limit. --grep
    searches the archive alone, which has a group a minute after it was trained at the latest.

    Example: paceline samples --run-dir runs/demo --sort worst --limit 3

    Args:
        limit N: Number of groups, at most.
        step: Only groups of this step.
        row: Only groups of this row of the data set, over all epochs and attempts.
        grep TEXT: Only groups with this text in prompt or completion, in upper or lower case.
        sort: Order by mean reward, length, age or staleness.
    """
    if grep is not None and not 0 < len(grep) <= MOST_TEXT:
        raise BadInput(f"--grep: give 1 to {MOST_TEXT} characters")
    found = find_groups(target, limit, step, row, grep, sort)
    if as_json:
        print_json(found)
        return
    for group in found["groups"]:
        typer.echo(_text(group))
    if not found["groups"]:
        typer.echo(
            "no such samples: there are none yet, or archive.enabled was false or archive.max_mb "
            "too small to keep them"
        )
    elif found["total"] > len(found["groups"]):
        typer.echo(f"{plural(found['total'] - len(found['groups']), 'more group')}: --limit N")


def find_groups(
    target: Target, limit: int, step: int | None, row: int | None, grep: str | None, sort: str
) -> dict[str, Any]:
    """``groups`` with their completions, and the ``total`` of those that match: of the controllers,
    or of the run's archive if none answers."""
    from paceline.rpc.auth import AuthError

    query = {"limit": limit, "step": step, "row": row, "sort": ORDER.get(sort, str(sort))}
    query |= {} if grep is None else {"grep": grep}
    run_dir = target.run_dir
    try:
        return target.ask(partial(_ask, query))
    except AuthError:
        raise
    except (BadInput, Unreachable):
        if run_dir is None or not (run_dir / "config.toml").is_file():
            raise
        return _from_archive(run_dir, query)


async def _ask(query: dict[str, Any], control: ControlPlane) -> dict[str, Any]:
    from paceline.rpc.client import RequestRefused
    from paceline.v1 import admin_pb2

    async def read(**fields: Any) -> Any:
        request = admin_pb2.GroupsRequest(**fields)
        reply = await control.call("AdminService.ReadGroups", request, 2 * ANSWER_S, ANSWER_S)
        return json.loads(reply.json)

    found = await read(**query)
    groups = []
    for summary in found["groups"]:
        try:
            groups.append(await read(group_id=summary["group_id"]))
        except RequestRefused as error:
            if error.code != RefusalCode.UNKNOWN.grpc_status:
                raise
            # The archive has its metadata only.
            groups.append({**summary, "prompt": None, "completions": []})
    return {"groups": groups, "total": found["total"]}


def _from_archive(run_dir: Path, query: dict[str, Any]) -> dict[str, Any]:
    from paceline.observe.groups import Filter, Group, listed
    from paceline.observe.samples import ArchiveReader

    archive, chosen = ArchiveReader(run_dir), Filter(step=query["step"], row=query["row"])
    groups = archive.groups(dropped=chosen.row is not None)
    if "grep" in query:
        groups = archive.with_text(groups, query["grep"])
    found, kind = listed(groups, chosen, query["sort"], query["limit"]), TypeAdapter(Group)
    whole = (kind.validate_python(archive.group(group.group_id)) for group in found.groups)
    details = [kind.dump_python(group, mode="json") for group in whole]
    return {"groups": details, "total": found.total}


FACTS = (
    *("step {step}", "{state}", "dropped: {reason}", "by {owner}"),
    *("reward {reward_mean:.3f} ± {reward_std:.3f}", "{tokens} tokens", "staleness {staleness}"),
    "\n  attempt {attempt}",
    *("row {dataset_row} of the data set", "epoch {epoch}"),
    "versions {min_version} to {max_version}",
)
"""Facts of a group. One with a field that is not known is left out."""


def _text(group: dict[str, Any]) -> str:
    """A group as text: the prompt, then each completion under its reward."""
    known, facts = {name: v for name, v in group.items() if v is not None}, []
    for line in FACTS:
        with contextlib.suppress(KeyError):
            facts.append(line.format_map(known))
    text = f"{group['group_id']}  {', '.join(facts)}".replace(", \n", "\n")
    if group["prompt"]:
        text += _indented(group["prompt"], "  > ")
    if not group["completions"]:
        text += "\n  (its completions are not kept)"
    for completion in group["completions"]:
        parts = completion["reward_components"]
        shown = ", ".join(f"{name} {value:.3g}" for name, value in sorted(parts.items()))
        text += f"\n  [{completion['reward']:.3g}]" + (f" ({shown})" if len(parts) > 1 else "")
        versions = "+".join(str(version) for version, _ in completion["versions"]) or "-"
        counted = plural(completion["token_count"], "token")
        if (left := completion.get("branch_of")) is not None:
            counted += f" after {completion['shared_tokens']} of completion {left + 1}"
        text += f" version {versions}, {counted}, {completion['finish_reason']}"
        text += _indented(completion["text"], "      ")
    return text + "\n"


def _indented(text: str, indent: str) -> str:
    return "".join(f"\n{indent}{line}" for line in printable(text).split("\n"))
