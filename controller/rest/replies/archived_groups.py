"""Groups of the sample archive, as replies."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from controller.rest.schemas import GroupReply, GroupSummary
from paceline.observe.archive_search import ArchiveSearch
from paceline.observe.sample_archive import ArchiveReader


class ArchivedGroups:
    """Reads the run's archive; blocks for as long as the disk takes."""

    def __init__(self, run_dir: Path) -> None:
        self._reader = ArchiveReader(run_dir)
        self._search = ArchiveSearch(run_dir)

    def beside(self, kept: Iterable[GroupSummary], *, dropped: bool = False) -> list[GroupSummary]:
        """``kept``, the groups that are still stored whole, and the archived ones that are not in
        it; with ``dropped`` also those that were not trained."""
        found = list(kept)
        there = {(group.group_id, group.attempt) for group in found}
        for row in self._reader.groups():
            if row["state"] == "dropped" and not dropped:
                continue
            if (row["group_id"], row["attempt"]) not in there:
                found.append(GroupSummary.model_validate(_known(row)))
        return found

    def with_text(self, found: Iterable[GroupSummary], text: str) -> list[GroupSummary]:
        """Those of ``found`` that have ``text`` in their archived prompt or in a completion."""
        matches = self._search.groups_with(text)
        return [group for group in found if (group.group_id, group.attempt) in matches]

    def group(self, group_id: str) -> GroupReply | None:
        row = self._reader.group(group_id)
        return None if row is None else GroupReply.model_validate(_known(row))


def _known(row: dict[str, object]) -> dict[str, object]:
    """Without what was not known: the reply's default is taken."""
    return {name: value for name, value in row.items() if value is not None}
