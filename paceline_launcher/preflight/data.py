"""Checks of the data sets that a run reads: files, or names of the hub."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from paceline.config.model_files import model_file
from paceline.config.schema import Config, length_in_words, run_steps
from paceline.dataset.rows import DataError, Row, RowSource, prompt_of
from paceline.dataset.training_rows import load_rows_of, open_source, open_training_rows
from paceline.errors import BadInput, plural
from paceline_launcher.preflight.findings import CORRECT, Finding, Findings, Start, fail, ok, warn

ANSWERS = 64  # Rows of a source whose answers are looked at
PROMPTS = 256  # First rows whose prompts are counted


@dataclass(frozen=True, slots=True)
class FoundData:
    findings: list[Finding]
    training: Sequence[RowSource] = ()
    """Rows to train with, of each source that could be read."""

    @property
    def first_row(self) -> Row | None:
        return self.training[0][0] if self.training else None

    def answers(self, field: str | None) -> Iterator[tuple[str, Any]]:
        """Answers of a few rows of each source, each with its place."""
        for rows in self.training if field else ():
            last = len(rows) - 1
            for index in sorted({n * last // (ANSWERS - 1) for n in range(ANSWERS)}):
                answer = rows[index].get(str(field))
                if isinstance(answer, str | int | float):
                    yield f"{rows.where}: row {index}", answer


def open_data(config: Config) -> FoundData:
    data = config.data
    training: dict[str, Callable[[], RowSource]] = {
        f"data.sources.{name}": partial(open_source, name, source, data)
        for name, source in sorted(data.sources.items())
    }
    if data.path is not None:
        training["data.path"] = lambda: open_training_rows(data)[0]
    evaluated: dict[str, Callable[[], RowSource]] = {
        f"evaluation.sets.{name}.path": partial(
            load_rows_of, held.path, held.data(data), name=held.name, split=held.split
        )
        for name, held in config.evaluation.sets.items()
    }
    if data.eval_path is not None:
        evaluated["data.eval_path"] = partial(
            load_rows_of, data.eval_path, data, name=data.name, split=data.eval_split
        )
    findings: list[Finding] = []
    read: dict[str, RowSource] = {}
    for setting, load in (training | evaluated).items():
        try:
            read[setting] = load()
        except DataError as error:
            text = error.found
            text = text if text.startswith(setting) else f"{setting}: {text}"
            findings.append(fail(text, error.remedy or CORRECT))
    rows = [read[setting] for setting in training if setting in read]
    return FoundData(findings or [ok(plural(sum(map(len, rows)), "row"))], rows)


def prompt_lengths(start: Start) -> Findings:
    """Checks whether the first prompts fit, without what a chat template adds."""
    from tokenizers import Tokenizer

    config, most, counts = start.config, start.config.data.max_prompt_tokens, []
    if config.recorded or config.data.long_prompts != "drop":
        return
    try:
        path = model_file(config.model.tokenizer or config.model.path, "tokenizer.json")
        encode = Tokenizer.from_file(str(path)).encode
    except Exception:  # whatever that library raises for no such file, or one of another kind
        return
    rows = (source[index] for source in start.data.training for index in range(len(source)))
    for row in islice(rows, PROMPTS):
        with contextlib.suppress(DataError):
            content = prompt_of(row, config.data)
            text = content if isinstance(content, str) else "".join(m["content"] for m in content)
            counts.append(len(encode(text, add_special_tokens=False).ids))
    longer = sum(count > most for count in counts)
    remedy = "Raise it, or set data.long_prompts to truncate them"
    if counts and longer == len(counts):
        known = plural(len(counts), "prompt")
        found = f"the shortest of {known} has {min(counts)}, so that all are dropped"
        yield fail(f"data.max_prompt_tokens = {most}: {found}", remedy)
    elif longer:
        found = f"{longer} of the first {len(counts)} prompts are longer, and are dropped"
        yield warn(f"data.max_prompt_tokens = {most}: {found}", remedy)


def run_length(start: Start) -> Findings:
    try:
        if rows := sum(map(len, start.data.training)):
            yield ok(length_in_words(start.config, rows))
    except BadInput as error:
        yield fail(str(error))


def steps_of(config: Config) -> int:
    """Steps of the run. Opens the data if train.epochs is its length. Raises BadInput."""
    rows = 0 if config.train.epochs is None else len(open_training_rows(config.data)[0])
    return run_steps(config, rows)
