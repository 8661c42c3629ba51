"""What a run is recognized by."""

import pytest

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.protocols.run_identity import check_unchanged


def test_a_changed_argument_is_named_with_both_values():
    recorded = {"lr": 0.1, "test_domains": [0], "model_kwargs": {"moe_layers": [8, 10]}, "workers": 2, "resume": None}
    check_unchanged(recorded, {**recorded, "model_kwargs": {"moe_layers": (8, 10)}, "workers": 0, "resume": "auto"})
    with pytest.raises(ArgumentError, match=r"lr=0.2: the run to resume was started with 0.1"):
        check_unchanged(recorded, {**recorded, "lr": 0.2})
    with pytest.raises(ArgumentError, match=r"averaging='ema': .* started with None"):
        check_unchanged(recorded, {**recorded, "averaging": "ema"})
