"""Nothing is allocated on the word of a message that does not hold together."""

from typing import Any

import pytest
import torch

from paceline.weights.weight_manifest import Manifest, WeightsRefused

LIMIT = 1 << 20


def described() -> dict[str, Any]:
    tied = torch.ones(4, 4)
    named = [("embed", tied), ("head", tied), ("scalar", torch.tensor(1.0)), ("none", tied[:0])]
    return Manifest.of(named, bucket_bytes=4096).to_json()


def test_what_one_end_describes_the_other_lays_out() -> None:
    manifest = Manifest.from_json(described(), limit_bytes=LIMIT)
    views = manifest.views(torch.zeros(manifest.total_bytes, dtype=torch.uint8))
    assert views["embed"] is views["head"]
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        "embed": (4, 4),
        "head": (4, 4),
        "scalar": (),
        "none": (0, 4),
    }
    assert manifest.total_bytes == 128


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (["w", "float32", [1 << 40], ""], "more than the limit"),
        (["w", "float32", [1 << 20, 1 << 30], ""], "more than the limit"),
        (["w", "float32", [-1], ""], "impossible shape"),
        (["w", "float32", [1.5], ""], "impossible shape"),
        (["w", "float32", [True], ""], "impossible shape"),
        (["w", "float32", [1] * 17, ""], "impossible shape"),
        (["w", "complex64", [1], ""], "unknown dtype"),
        (["w", ["float32"], [1], ""], "unknown dtype"),
        (["", "float32", [1], ""], "no proper name"),
        (["embed", "float32", [1], ""], "two tensors"),
        (["w", "float32", [4, 4], "later"], "tied"),
        (["w", "float32", [4, 5], "embed"], "tied"),
        (["w", "bfloat16", [4, 4], "embed"], "tied"),
        (["w", "float32", [4, 4], "head"], "tied"),
        (["w", "float32", [1]], "four fields"),
        ("w", "four fields"),
    ],
)
def test_an_impossible_tensor_is_refused(row: Any, why: str) -> None:
    message = described()
    message["tensors"].append(row)
    with pytest.raises(WeightsRefused, match=why):
        Manifest.from_json(message, limit_bytes=LIMIT)


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        {},
        {"bucket_bytes": 4096},
        {"bucket_bytes": 0, "tensors": []},
        {"bucket_bytes": 1 << 40, "tensors": []},
        {"bucket_bytes": "4096", "tensors": []},
        {"bucket_bytes": 4096, "tensors": {}},
    ],
)
def test_a_malformed_manifest_is_refused(message: Any) -> None:
    with pytest.raises(WeightsRefused):
        Manifest.from_json(message, limit_bytes=LIMIT)


def test_two_weights_of_one_name_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="two weights"):
        Manifest.of([("w", torch.ones(1)), ("w", torch.ones(1))], bucket_bytes=4096)
