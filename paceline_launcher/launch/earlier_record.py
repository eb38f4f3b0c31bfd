"""Earlier record of a run directory.

It is put back if a start is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FILES = ("config.toml", "summary.json")
"""What a start replaces before the controllers have accepted it."""


@dataclass(frozen=True, slots=True)
class EarlierRecord:
    run_dir: Path
    exists: bool
    """The directory holds a run."""
    content: dict[str, bytes | None]

    @classmethod
    def take(cls, run_dir: Path) -> EarlierRecord:
        def read(name: str) -> bytes | None:
            path = run_dir / name
            return path.read_bytes() if path.is_file() else None

        content = {name: read(name) for name in FILES}
        return cls(run_dir, (run_dir / "events.jsonl").is_file(), content)

    def restore(self) -> None:
        for name, content in self.content.items():
            path = self.run_dir / name
            if content is None:
                path.unlink(missing_ok=True)
                continue
            fresh = path.with_name(f".{name}.earlier")
            fresh.write_bytes(content)
            fresh.replace(path)
