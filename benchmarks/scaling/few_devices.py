"""One to eight devices: a fixed split, turns, or devices that are lent. Each is the product itself.

    python -m benchmarks.scaling.few_devices choice [--devices 1 2 4 8] [--steps small large]
    python -m benchmarks.scaling.few_devices lending [--devices 4] [--update 0.004]
    python -m benchmarks.scaling.few_devices picture

``choice`` compares, on the same devices: the split that fits the device times best, asynchronous;
turns, synchronous (the classical colocated trainer) and with generation that runs ahead. A small
step has as many samples as all devices have slots, a large one four times as many. ``lending``
starts every split, fixed and lent; ``--update`` makes training dearer. What is compared runs one
after the other. Runs are added to those in the results; ``picture`` draws them.
"""

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks import runs
from benchmarks.scaling.alone import Batch
from benchmarks.scaling.device_times import DeviceTimes
from benchmarks.scaling.fleet import Cell, measure, started, steps, tokens_per_s
from benchmarks.scaling.report import ARMS, choices
from paceline.observe.vocabulary import EventType

GROUP_SIZE = 4
WAVES = {"small": 1, "large": 4}
"""Samples of a step by slots of all engines."""
AHEAD = 2
"""Staleness of what is asynchronous."""
MEASURED_STEPS = 5
"""fleet.autoscale_steps: at most so many steps decide whether a device moves."""
STEPS_OF_A_SWITCH = 3
"""Not counted once a device has moved."""
LIMIT_S = 300.0
PICTURE = runs.REPOSITORY / "docs" / "images" / "few_devices.png"


def right_split(devices: int, times: DeviceTimes) -> int:
    """Devices that train, of a split with which the slower side is fastest."""
    generation = times.token_s(times.slots) / times.slots
    shares = {n: max(times.update_s / n, generation / (devices - n)) for n in range(1, devices)}
    return min(shares, key=shares.__getitem__)


def arms(devices: int, batch: Batch, times: DeviceTimes) -> list[Cell]:
    """What is compared on ``devices``. One device cannot be split."""
    found = []
    if devices > 1:
        train = right_split(devices, times)
        found = [Cell(devices - train, AHEAD, batch, times, policies=train)]
    for staleness in (0, AHEAD):
        pairs = Cell(devices, staleness, batch, times, policies=devices, sharing="turns")
        found.append(pairs)
    return found


def batch_of(devices: int, waves: int, times: DeviceTimes) -> Batch:
    return Batch(devices * waves * times.slots // GROUP_SIZE, GROUP_SIZE)


def compare(args: Any, times: DeviceTimes, results: runs.Results) -> None:
    cells = [
        (size, cell)
        for size, devices in itertools.product(args.steps, args.devices)
        for cell in arms(devices, batch_of(devices, WAVES[size], times), times)
    ]
    for _, (size, cell) in itertools.product(range(args.repeats), cells):
        shared = cell.sharing != "none"
        devices = cell.rollouts if shared else cell.rollouts + cell.policies
        row = {"what": "choice", "devices": devices, "step": size, "sharing": cell.sharing}
        results.add({**row, **_loaded(), **measure(cell, args.window)})


def lending_arms(
    devices: int, times: DeviceTimes, starts: Sequence[int] = ()
) -> Iterator[tuple[int, Cell]]:
    """Every number of devices that train at the start, or these ``starts``: fixed, and lent."""
    batch = batch_of(devices, WAVES["small"], times)
    for train in starts or range(1, devices):
        yield train, Cell(devices - train, AHEAD, batch, times, policies=train)
        pairs = Cell(devices, AHEAD, batch, times, policies=devices, sharing="lend")
        yield (
            train,
            replace(pairs, fleet={"training_pairs": train, "autoscale_steps": MEASURED_STEPS}),
        )


def lend(args: Any, times: DeviceTimes, results: runs.Results) -> None:
    times = replace(times, update_s=args.update)
    cells = [(d, *arm) for d in args.devices for arm in lending_arms(d, times, args.training)]
    for _, (devices, training, cell) in itertools.product(range(args.repeats), cells):
        row = {"what": "lending", "devices": devices, "training": training, "update_s": args.update}
        results.add(
            {**row, "sharing": cell.sharing, **_loaded(), **measure_loans(cell, args.window)}
        )


def measure_loans(cell: Cell, window_s: float) -> dict[str, Any]:
    """Rates of the whole time after the warm-up, and of what follows the last move of a device."""
    with started(cell) as up:
        up.until(lambda: _seconds(steps(up)[cell.warm_up - 1 :]) >= window_s, LIMIT_S)
        begun, *measured = steps(up)[cell.warm_up - 1 :]
        moves = up.events(EventType.TRAINING_SEATS_SET)
    last = max((float(move["t"]) for move in moves), default=float(begun["t"]))
    settled = [row for row in (begun, *measured) if row["t"] >= last][
        STEPS_OF_A_SWITCH if moves else 0 :
    ]
    return {
        "groups_per_step": cell.batch.groups,
        "steps": len(measured),
        "seconds": _seconds([begun, *measured]),
        "tokens_per_s": tokens_per_s(begun, measured),
        "moves": [[move["t"] - begun["t"], move["seats"], move["why"]] for move in moves],
        "settled_steps": len(settled) - 1,
        "settled_tokens_per_s": tokens_per_s(settled[0], settled[1:]),
    }


def draw(found: Mapping[str, Any]) -> None:
    """Tokens per second and device, by devices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, step in zip(figure.subplots(1, len(WAVES), sharey=True), WAVES, strict=True):
        rates = choices(found, step)
        for arm in ARMS.values():
            line = {
                devices: by_arm[arm] / devices for devices, by_arm in rates.items() if arm in by_arm
            }
            axes.plot(list(line), list(line.values()), marker="o", label=arm)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(rates), [str(devices) for devices in rates])
        axes.set_xticks([], minor=True)
        axes.set_title(f"{step} steps")
        axes.set_xlabel("devices")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylim(bottom=0)
    figure.axes[0].set_ylabel("tokens/s of a device")
    figure.axes[0].legend()
    figure.savefig(PICTURE, dpi=128)


def _seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(rows[-1]["t"] - rows[0]["t"]) if rows else 0.0


def _loaded() -> dict[str, float]:
    return {"load_at_start": round(os.getloadavg()[0], 2)}


def main() -> None:
    parser = runs.options("scaling.few_devices", __doc__, "few_devices")
    parser.add_argument("what", choices=["choice", "lending", "picture"])
    parser.add_argument("--devices", type=int, nargs="+")
    parser.add_argument("--steps", nargs="+", choices=list(WAVES), default=list(WAVES))
    parser.add_argument("--training", type=int, nargs="+", default=(), help="at the start: lending")
    parser.add_argument("--update", type=float, default=DeviceTimes().update_s, help="likewise")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each arm")
    parser.add_argument("--window", type=float, help="measured seconds of a run")
    args = parser.parse_args()
    if args.what == "picture":
        draw(json.loads(args.out.read_text()))
        return
    times, results = DeviceTimes(), runs.Results(args.out)
    results.data |= {"times": asdict(times), "group_size": GROUP_SIZE}
    if args.what == "choice":
        args.devices, args.window = args.devices or [1, 2, 4, 8], args.window or 30.0
        compare(args, times, results)
    else:
        args.devices, args.window = args.devices or [4], args.window or 120.0
        lend(args, times, results)


if __name__ == "__main__":
    main()
