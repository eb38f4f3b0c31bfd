"""Names of a state's tensors in a checkpoint.

model.<name>  optimizer.<name>.<moment>                 of the main part
model.<part>/<name>  optimizer.<part>/<name>.<moment>   of another one
scalar.<name>                                           a number of the objective
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor

from policy_worker.model.train_state import TrainState

WEIGHTS = "model."


def named_tensors(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state, by its name in a checkpoint."""
    for name, tensor in state.named_weights():
        yield WEIGHTS + name, tensor
    for name, parameter in state.named_parameters():
        for moment, value in state.optimizer.state.get(parameter, {}).items():
            yield f"optimizer.{name}.{moment}", value
    for name, value in state.scalars.items():
        yield f"scalar.{name}", value


def weights_of_part(names: Iterable[str], part: str) -> dict[str, str]:
    """Those of ``names`` that are weights of ``part``, with their names in the model; "" is the
    main part."""
    prefix = f"{WEIGHTS}{part}/" if part else WEIGHTS
    mine = [name for name in names if name.startswith(prefix) and (part or "/" not in name)]
    return {name: name.removeprefix(prefix) for name in mine}


def shared_weights(
    state: TrainState, targets: Mapping[str, Tensor], stored: Collection[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """Of a checkpoint of another objective, which has the tensors ``stored``: the weights of the
    parts that both have, and the names by which such a part differs. Both have the main part."""
    shared: dict[str, Tensor] = {}
    strange: set[str] = set()
    for part in state.parts:
        name = "" if part == state.main else part
        there = weights_of_part(stored, name).keys()
        if there or not name:
            here = weights_of_part(targets, name).keys()
            shared |= {found: targets[found] for found in here}
            strange |= here ^ there
    return shared, sorted(strange)
