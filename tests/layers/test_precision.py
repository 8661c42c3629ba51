"""Computation in float32 inside layers of other types, and where values may be read."""

import torch

from timm_moe_dg.layers.precision import UpcastLinear, upcast, values_readable, without_autocast


def test_a_half_precision_layer_computes_in_float32_and_a_double_one_stays():
    torch.manual_seed(0)
    layer, x = UpcastLinear(64, 3).bfloat16(), torch.randn(5, 64).bfloat16()
    expected = x.double() @ layer.weight.double().t() + layer.bias.double()
    assert layer(x).dtype == torch.float32
    torch.testing.assert_close(layer(x), expected.float())
    assert (torch.nn.functional.linear(x, layer.weight, layer.bias) - expected).abs().max() > 1e-3
    assert layer.double()(x).dtype == torch.float64
    assert [upcast(x.to(dtype)).dtype for dtype in (torch.float16, torch.float64)] == [torch.float32, torch.float64]


def test_autocast_is_off_inside_and_devices_without_it_do_not_mind():
    with torch.autocast("cpu"):
        with without_autocast("cpu"):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    with without_autocast("meta"):
        pass


def test_values_are_readable_in_eager_calls_alone():
    def record(x):
        readable.append(values_readable(x))
        return x.sum()

    readable: list[bool] = []
    x = torch.ones(2, 2)
    record(x)
    record(x.to("meta"))
    torch.func.grad(record)(x)
    torch.vmap(record)(x)
    torch.jit.trace(record, x, check_trace=False)
    assert readable == [True, False, False, False, False]
