"""Settings of train that are to absorb an engine that disagrees with the trainer, and the plain loss."""

from __future__ import annotations

from typing import Any

PLAIN: dict[str, Any] = {"proximal": "behaviour"}

CORRECTIONS: dict[str, dict[str, Any]] = {
    "truncated importance sampling": {"proximal": "trainer", "tis_cap": 2.0},
    "token mask": {"proximal": "behaviour", "mask_ratio_token": (0.5, 2.0)},
    "importance sampling and sequence mask": {
        "proximal": "trainer",
        "tis_cap": 2.0,
        "mask_ratio_sequence": (0.2, 5.0),
    },
}
