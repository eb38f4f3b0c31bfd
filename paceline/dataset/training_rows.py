"""Training rows of a run, from one source or several."""

from paceline.config.sections.training import DataConfig, SourceConfig
from paceline.dataset.data_order import DataSource, shares
from paceline.dataset.recorded_rows import check_run_rows
from paceline.dataset.row_source import Concatenated, DataError, RowSource
from paceline.dataset.rows import load_rows


def open_training_rows(data: DataConfig) -> tuple[RowSource, tuple[DataSource, ...]]:
    """The checked rows of ``data``, and its sources in their order; none if there is one source
    without a name. Raises DataError."""
    if data.path is not None:
        rows = load_rows(data.path, name=data.name, split=data.split)
        check_run_rows(rows, data)
        return rows, ()
    # By name: the order of the tables in the file decides nothing.
    names = sorted(data.sources)
    parts = [open_source(name, data.sources[name], data) for name in names]
    weights = [w for name in names if (w := data.sources[name].weight) is not None]
    counts = shares(weights) if len(weights) == len(names) else (0,) * len(names)
    sources = tuple(map(DataSource, names, map(len, parts), counts))
    return Concatenated(parts, data.described), sources


def open_source(name: str, source: SourceConfig, data: DataConfig) -> RowSource:
    common = {}
    for setting, own in source.renamed_fields.items():
        if (name_of_all := getattr(data, setting)) is None:
            raise DataError(
                f"data.sources.{name}: {setting} = {own!r}, but data.{setting} is none: set it to "
                "the name that the field has in all sources"
            )
        common[name_of_all] = own
    try:
        rows = load_rows(source.path, name=source.name, split=source.split)
        rows.renamed = common
        check_run_rows(rows, data)
    except DataError as error:
        raise DataError(f"data.sources.{name}: {error}") from None
    return rows
