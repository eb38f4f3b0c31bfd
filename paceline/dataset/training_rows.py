"""Training rows of a run, from one source or several."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.sections.training import DataConfig, SourceConfig
from paceline.dataset.data_order import DataSource, shares
from paceline.dataset.recorded_rows import check_run_rows
from paceline.dataset.row_source import Concatenated, DataError, Row, RowSource
from paceline.dataset.rows import load_rows


class RenamedFields(RowSource):
    """Rows of a source, with ``names`` (its name of a field, by the common one) added."""

    def __init__(self, rows: RowSource, names: Mapping[str, str]) -> None:
        self._rows = rows
        self._names = dict(names)
        self.where = rows.where
        self.digest = rows.digest
        common = [name for name, own in self._names.items() if rows.lacking(own) is None]
        self.fields = list(dict.fromkeys([*rows.fields, *common]))

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, index: int) -> Row:
        row = self._rows[index]
        return {**row, **{name: row[own] for name, own in self._names.items() if own in row}}

    def lacking(self, field: str) -> str | None:
        return self._rows.lacking(self._names.get(field, field))


@dataclass(frozen=True, slots=True)
class TrainingRows:
    rows: RowSource
    sources: tuple[DataSource, ...] = ()
    """In the order of their rows; none if there is one source without a name."""


def open_training_rows(data: DataConfig) -> TrainingRows:
    """Opens and checks the sources of ``data``. Raises DataError."""
    if data.path is not None:
        rows = load_rows(data.path, name=data.name, split=data.split)
        check_run_rows(rows, data)
        return TrainingRows(rows)
    # By name: the order of the tables in the file decides nothing.
    names = sorted(data.sources)
    parts = [open_source(name, data.sources[name], data) for name in names]
    weights = [w for name in names if (w := data.sources[name].weight) is not None]
    counts = shares(weights) if len(weights) == len(names) else (0,) * len(names)
    sources = [DataSource(*fields) for fields in zip(names, map(len, parts), counts, strict=True)]
    return TrainingRows(Concatenated(parts, data.described), tuple(sources))


def open_source(name: str, source: SourceConfig, data: DataConfig) -> RowSource:
    try:
        rows = load_rows(source.path, name=source.name, split=source.split)
        rows = RenamedFields(rows, _common_names(name, source, data))
        check_run_rows(rows, data)
    except DataError as error:
        raise DataError(f"data.sources.{name}: {error}") from None
    return rows


def _common_names(name: str, source: SourceConfig, data: DataConfig) -> dict[str, str]:
    found = {}
    for setting, own in source.renamed_fields.items():
        common = getattr(data, setting)
        if common is None:
            raise DataError(
                f"{setting} = {own!r}, but data.{setting} is none: set it to the name that the "
                "field has in all sources"
            )
        found[common] = own
    return found
