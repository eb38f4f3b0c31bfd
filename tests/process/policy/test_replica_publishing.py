"""A replica of two ranks publishes to a real receiver: each rank sends its buckets, and what
arrives are its weights."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.weights.weight_manifest import Manifest, WeightShard
from tests.fixtures import ranks
from tests.fixtures.train_states import tiny_config
from tests.fixtures.weight_links import ReceivingEnd, link

BUCKET_BYTES = 1024

pytestmark = pytest.mark.timeout(600)


class Replica:
    """A process of two ranks, with their weights in ``folder``."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        model = tiny_config(folder).model_dump_json()
        self.process = ranks.start(
            2,
            "publishing",
            config=model,
            url=url,
            run_dir=str(folder),
            bucket_bytes=BUCKET_BYTES,
        )

    def asks(self, **line: Any) -> dict[str, int]:
        """Has rank 0 do it; returns the bytes that it has sent so far."""
        process: subprocess.Popen[str] = self.process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(line) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, process.stderr and process.stderr.read()
        return dict(json.loads(answer))

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{version}.safetensors")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def receiving(url: str) -> Iterator[ReceivingEnd]:
    made = ReceivingEnd(url, "ranks", stall_s=10.0)
    yield made
    made.receiver.close()


def test_two_ranks_publish_the_weights_that_they_train(
    tmp_path: Path, url: str, receiving: ReceivingEnd
) -> None:
    replica = Replica(tmp_path / "replica", url)
    try:
        replica.asks(links=[1])
        receiving.receiver.set_link(link(1))
        replica.asks(publish=1)
        first = replica.weights(1)
        receiving.gets(1, first)
        manifest = Manifest.of(first.items(), bucket_bytes=BUCKET_BYTES)
        replica.asks(step=True, publish=2)
        receiving.gets(2, replica.weights(2))
        assert any(not torch.equal(t, first[n]) for n, t in replica.weights(2).items())
        # Links come and go while nothing is published.
        # The receiver lets go of link 1 first: whoever is left behind sees it break.
        receiving.receiver.set_link(link(2))
        replica.asks(links=[2])
        sent = replica.asks(step=True, publish=3)["sent"]
        receiving.gets(3, replica.weights(3))
        own = WeightShard(0, 2).size_bytes(manifest)
        assert own < 0.6 * manifest.total_bytes
        assert sent <= 3 * own, "the other half came from the other rank"
        assert receiving.errors.empty()
        _, err = replica.process.communicate(timeout=60)
        assert replica.process.returncode == 0, err
    finally:
        replica.close()
