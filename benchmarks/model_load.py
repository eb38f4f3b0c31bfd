"""Host memory while the ranks of a replica load a model: how much above the shards that they keep.

    python -m benchmarks.model_load [--layers N] [--hidden N] [--ranks 1,2,4] [--out FILE]

A model is made on disk in bfloat16 and loaded in float32 by all ranks of a replica at once, on the CPU. Memory is what the
processes have allocated (anonymous pages); files that the kernel has mapped are not counted, because it can drop them. The
peak is that of the sum over the ranks, sampled every 5 ms, above what they had before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs import child, machine, write
from paceline.process.lifetime.process_exit import leave_after
from policy_worker.ranks.rank_group import RankGroup, join_ranks, start_ranks

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


def load(replica: RankGroup, path: str, whole: bool) -> dict[str, Any]:
    """Bytes of the shards of all ranks, and the sum of their peaks while they load."""
    from paceline.config.schema import Config
    from policy_worker.model import load_part
    from policy_worker.objectives.part import Part
    from policy_worker.ranks.sharding import load_sharded, shard_model
    from policy_worker.state import local_tensor

    settings = {"model": {"path": path, "device": "cpu"}, "data": {"path": "d"}}
    config, device = Config.model_validate(settings), torch.device("cpu")
    torch.zeros(1)
    replica.agree(True)
    begun = time.monotonic()
    with Peak() as peak:
        if whole and replica.mesh is not None:  # as it was before slices were read
            model = shard_model(load_part(Part("policy"), config, device), replica.mesh)
        else:
            model = load_sharded(Part("policy"), config, replica, device, trainable=True)
        replica.agree(True)
    seconds = time.monotonic() - begun
    kept = sum(local_tensor(p).nbytes for p in model.parameters())
    everyone = replica.gather([kept, peak.above])
    shards, peaks = (sum(values) for values in zip(*everyone, strict=True))
    return {
        "ranks": replica.size,
        "how": "whole" if whole or replica.size == 1 else "slices",
        "shards_mib": shards / 2**20,
        "peak_mib": peaks / 2**20,
        "peak_over_shards": peaks / shards,
        "seconds": seconds,
    }


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


def one(arguments: argparse.Namespace) -> int:
    """One measurement, in this process and those of the other ranks."""
    handed = json.dumps([arguments.path, arguments.whole])
    replica = start_ranks(
        arguments.one, config_json=handed, worker=("benchmarks.model_load", "--rank")
    )
    print(json.dumps(load(replica, arguments.path, arguments.whole)), flush=True)
    replica.close()
    return 0


def rank() -> int:
    replica, handed = join_ranks()
    load(replica, *json.loads(handed))
    replica.next_command()
    replica.close()
    return 0


def measure(arguments: argparse.Namespace) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), arguments.hidden, arguments.layers)
        for count in (int(part) for part in arguments.ranks.split(",")):
            for how in ([], ["--whole"]) if count > 1 else ([],):
                rows.append(child("benchmarks.model_load", "--one", count, "--path", folder, *how))
                print(rows[-1], flush=True)
    write("model_load", {"machine": machine(), "loads": rows}, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--path", default="", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        leave_after(rank, "model_load")
    if arguments.one:
        leave_after(lambda: one(arguments), "model_load")
    measure(arguments)


if __name__ == "__main__":
    main()
