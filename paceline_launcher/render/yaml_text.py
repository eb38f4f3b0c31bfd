"""YAML text of manifests: keys in their order, texts of several lines as blocks, no aliases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(documents: Sequence[dict[str, Any]], comment: str) -> str:
    """``documents`` as one file that opens with ``comment``, lines of plain text."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    bodies = [
        yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
        for one in documents
    ]
    return head + "---\n".join(bodies)
