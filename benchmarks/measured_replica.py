"""Measurements in the ranks of a replica: a process for each rank, and a fresh replica for each
measurement."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.process.lifetime import leave_after
from policy_worker.ranks.rank_group import join_ranks, start_ranks

SAMPLE_S = 0.005


def allocated() -> int:
    """Bytes of anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


class Peak:
    """Largest allocation of this process while it is entered, above that at the start."""

    def __enter__(self) -> Peak:
        self.start = self.largest = allocated()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.largest = max(self.largest, allocated())

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.largest = max(self.largest, allocated())

    @property
    def so_far(self) -> int:
        """Bytes above the start, while it is entered."""
        return max(self.largest, allocated()) - self.start

    @property
    def above(self) -> int:
        return self.largest - self.start


def make_model(path: Path, hidden: int, layers: int) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = Qwen3Config(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those by which a benchmark starts itself again, as rank 0 and as the other ranks."""
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)


def take_part(
    arguments: argparse.Namespace,
    module: str,
    scenario: Callable[..., dict[str, Any]],
    handed: list[Any],
) -> None:
    """If this process is a rank: runs ``scenario`` (the replica, and what was ``handed`` to rank 0)
    and ends the process. Rank 0 prints the result as JSON, and starts the others with ``module``.
    """

    def rank() -> int:
        replica, given = join_ranks()
        scenario(replica, *json.loads(given))
        replica.next_operation()
        replica.close()
        return 0

    def one() -> int:
        replica = start_ranks(
            arguments.one, config_json=json.dumps(handed), worker=(module, "--rank")
        )
        print(json.dumps(scenario(replica, *handed)), flush=True)
        replica.close()
        return 0

    if arguments.rank:
        leave_after(rank, module)
    if arguments.one:
        leave_after(one, module)
