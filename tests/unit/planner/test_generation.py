"""Generation of the planner against the exact time of a single wave, and its limits."""

import numpy as np
import pytest

from testbed.planner.generation import Generation
from testbed.planner.lengths import Lengths
from testbed.planner.system import Accelerator, EngineTime, ModelSize, StageTime

ROOMY = EngineTime(fixed=0.01, per_sequence=0.001, per_context_token=1e-6, cache_tokens=1e9)


def run_out(engines: Generation) -> list[tuple[float, int]]:
    ended = []
    while engines.busy:
        ended += engines.advance(engines.tick_s)
    return ended


def wave_seconds(engine: EngineTime, lengths: list[int], prompt: int) -> float:
    """Token by token: every sequence that is longer than k is running while token k is made."""
    seconds = 0.0
    for k in range(max(lengths)):
        running = sum(length > k for length in lengths)
        seconds += engine.fixed + engine.per_sequence * running
        seconds += engine.per_context_token * running * (prompt + k)
    return seconds


def test_one_wave_takes_the_time_of_its_tokens() -> None:
    lengths = [3, 40, 41, 120, 500, 777, 1_000]
    engines = Generation(ROOMY, 1, prompt_tokens=50, cap=1_000)
    engines.add(0, np.array([lengths], dtype=float))
    ((ended, group),) = run_out(engines)
    assert group == 0
    assert ended == pytest.approx(wave_seconds(ROOMY, lengths, 50), rel=0.01)


def test_groups_go_to_the_engine_with_the_fewest_sequences() -> None:
    engines = Generation(ROOMY, 2, prompt_tokens=1, cap=100)
    engines.add(0, np.full((4, 3), 100.0))
    ended = run_out(engines)
    alone = wave_seconds(ROOMY, [100] * 6, 1)
    assert [group for _, group in sorted(ended)] == [0, 1, 2, 3]
    assert max(when for when, _ in ended) == pytest.approx(alone, rel=0.01)


def test_sequences_beyond_the_most_wait() -> None:
    one = EngineTime(0.01, 0.0, 0.0, 1e9, most=2)
    engines = Generation(one, 1, prompt_tokens=1, cap=100)
    engines.add(0, np.full((4, 1), 100.0))
    times = sorted(when for when, _ in run_out(engines))
    assert times == pytest.approx([1.0, 1.0, 2.0, 2.0], rel=0.02)


def test_a_full_cache_begins_no_sequence_and_an_empty_engine_begins_any() -> None:
    tight = EngineTime(0.01, 0.0, 0.0, cache_tokens=100)
    engines = Generation(tight, 1, prompt_tokens=90, cap=50)
    engines.add(0, np.full((3, 1), 50.0))
    times = sorted(when for when, _ in run_out(engines))
    # One at a time. Above 100 cached tokens a sequence runs slower, by at most 40 %.
    assert times[0] >= 0.5
    assert times[1] >= 2 * times[0] * 0.98
    assert times[2] <= 3 * 0.5 * 1.4


@pytest.mark.parametrize("sigma", [0.0, 0.8, 1.7])
def test_mean_of_clipped_lengths_is_that_of_draws(sigma: float) -> None:
    lengths = Lengths(400, sigma, 2_000)
    drawn = lengths.draw(np.random.default_rng(1), 20_000, 8)
    assert drawn.min() >= 1
    assert drawn.max() <= 2_000
    assert lengths.mean == pytest.approx(drawn.mean(), rel=0.02)
    assert Lengths.of_mean(lengths.mean, 2_000, sigma).mean == pytest.approx(lengths.mean, rel=1e-6)


def test_time_per_token_by_hand() -> None:
    gpu = Accelerator(memory=80e9, bandwidth=2e12, flops=1e15)
    model = ModelSize(parameters=10e9, active=5e9, kv_bytes=1e5)
    engine = EngineTime.of(model, gpu, tp=2, overhead_s=0.004)
    # 20 GB at 2 x 2 TB/s x 0.6; 2 x 5e9 operations at 2 x 1e15 x 0.5; 100 kB; (0.85 x 160 - 20) GB
    # of cache.
    assert engine.fixed == pytest.approx(0.004 + 20e9 / 2.4e12)
    assert engine.per_sequence == pytest.approx(1e-5)
    assert engine.per_context_token == pytest.approx(1e5 / 2.4e12)
    assert engine.cache_tokens == pytest.approx(116e9 / 1e5)
    with pytest.raises(ValueError, match="do not fit an engine of 1 GPUs"):
        EngineTime.of(ModelSize(40e9, 40e9, 1e5), gpu, 1, 0.0)


def test_stage_times_by_hand() -> None:
    assert StageTime.fit([(2, 60.0), (4, 40.0)]) == StageTime(80.0, 20.0)
    assert StageTime.fit([(2, 60.0), (2, 40.0)]) == StageTime(100.0, 0.0)
    assert StageTime.fit([(2, 40.0), (4, 60.0)]) == StageTime(0.0, 50.0)
    # Better than ideal: all of it scales. 60 / 2 + 10 / 4 over 1 / 4 + 1 / 16.
    assert StageTime.fit([(2, 60.0), (4, 10.0)]).gpu_seconds == pytest.approx(32.5 / 0.3125)
    half = StageTime(80.0, 20.0).with_constant_share(0.5, 4)
    assert (half.seconds(4), half.seconds(8)) == (40.0, 30.0)
