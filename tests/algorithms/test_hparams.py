"""Hyper-parameters of methods and averages: they arrive, they are drawn as numbers, bad ones are refused."""

import json

import numpy as np
import pytest

from tests.algorithms.networks import CLASSES, network
from timm_moe_dg.algorithms import ALGORITHMS, AVERAGING, Setup
from timm_moe_dg.algorithms.hparams import SEARCH_SPACES, resolve_hparams
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.errors import ArgumentError


@pytest.mark.parametrize("method", ALGORITHMS.values())
def test_hyper_parameters_reach_the_method_and_unknown_ones_are_refused(method):
    defaults = {**get_benchmark("rotated_digits").hparams, **method.HPARAMS}
    given = {name: 2 if isinstance(default, int) else 0.25 for name, default in method.HPARAMS.items()}
    resolved = resolve_hparams(defaults, {}, given)
    algorithm = method(Setup(network("mlp"), 3, CLASSES, hparams=resolved))
    assert given.items() <= algorithm.hparams.items()
    with pytest.raises(ArgumentError, match="no such \\['irm_lambd'\\]"):
        resolve_hparams(defaults, {}, {"irm_lambd": 1.0})


def test_no_method_s_hyper_parameter_hides_a_benchmark_s_or_an_average_s():
    for names in [method.HPARAMS for method in ALGORITHMS.values()]:
        assert not names.keys() & get_benchmark("rotated_digits").hparams.keys()
        assert not any(names.keys() & average.HPARAMS.keys() for average in AVERAGING.values())


@pytest.mark.parametrize("method", ALGORITHMS.values())
def test_draws_are_json_numbers_of_the_default_s_kind_and_random(method):
    assert method.SEARCH.keys() <= method.HPARAMS.keys()
    for name, entry in method.SEARCH.items():
        draw = SEARCH_SPACES["photographs"][entry] if isinstance(entry, str) else entry
        values = [draw(np.random.RandomState(seed)) for seed in range(20)]
        assert {type(value) for value in values} == {type(method.HPARAMS[name])}, name
        assert json.loads(json.dumps(values)) == values
        assert len(set(values)) > 1


OUT_OF_RANGE = [
    ("Fishr", "ema", 1.0, "at least 0 and less than 1"),
    ("DANN", "beta1", 1.0, "at least 0 and less than 1"),
    ("CDANN", "mlp_dropout", 2.0, "at least 0 and less than 1"),
    ("Mixup", "mixup_alpha", 0.0, "greater than 0"),
    ("ema", "ema_decay", 1.0, "at least 0 and less than 1"),
]


@pytest.mark.parametrize(("method", "name", "value", "allowed"), OUT_OF_RANGE)
def test_a_hyper_parameter_outside_its_range_is_refused(method, name, value, allowed):
    net, given = network("mlp"), {name: value}
    with pytest.raises(ArgumentError, match=f"hparams={{'{name}': {value}}}: {name} must be {allowed}"):
        AVERAGING[method](net, given) if method in AVERAGING else ALGORITHMS[method](
            Setup(net, 3, CLASSES, hparams=given)
        )


@pytest.mark.parametrize("method", [*ALGORITHMS.values(), *AVERAGING.values()])
def test_defaults_are_in_their_ranges(method):
    assert all(allowed.contains(method.HPARAMS[name]) for name, allowed in method.RANGES.items())
