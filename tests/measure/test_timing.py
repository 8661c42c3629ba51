"""Who is timed when, and what is made of it; clocks that tests set."""

import pytest

from timm_moe_dg.measure import cost
from timm_moe_dg.measure.cost import device_name, interleaved, quartiles, ratios, seconds_of


@pytest.fixture
def clock(monkeypatch):
    """A list with the time in seconds; steps move it on."""
    now = [100.0]
    monkeypatch.setattr(cost.time, "perf_counter", lambda: now[0])
    return now


def wait(clock, seconds):
    def step():
        clock[0] += seconds

    return step


def test_a_step_takes_the_mean_of_its_repeats(clock):
    durations = iter([1.0, 2.0, 6.0])
    assert seconds_of(lambda: wait(clock, next(durations))(), repeats=3) == 3.0


def test_rounds_go_in_turn_and_warming_up_does_not_count():
    calls = []
    measures = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "ab"}
    values = interleaved(measures, rounds=3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert values == {"a": [5.0, 7.0, 9.0], "b": [6.0, 8.0, 10.0]}


def test_a_machine_that_slows_down_halfway_leaves_the_ratio_alone(clock):
    slow = [1.0, 1.0, 10.0, 10.0]

    def measure(cost):
        speeds = iter(slow)
        return lambda: seconds_of(wait(clock, cost * next(speeds)))

    values = interleaved({"mixture": measure(3.0), "dense": measure(2.0)}, rounds=4)
    assert values["mixture"] == pytest.approx([3.0, 3.0, 30.0, 30.0])
    assert ratios(values["mixture"], values["dense"]) == pytest.approx([1.5] * 4)


def test_ratios_are_of_the_same_round_and_quartiles_divide_values_into_four_equal_parts():
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])
    # of 1 ... 7, the second, the fourth and the sixth have as many values on both sides as quarters demand
    assert quartiles([7, 1, 6, 2, 5, 3, 4]) == (2, 4, 6)
    assert quartiles([1.0, 2.0]) == (1.0, 1.5, 2.0)  # between the values


def test_devices_have_names():
    assert device_name("cpu")
    assert device_name("meta") == "meta"
