"""What is computed in float32 whatever surrounds it, and what kind of program a layer finds itself in."""

import torch

from timm_moe_dg.layers.precision import UpcastLinear, portable_path, upcast, values_hidden, without_autocast


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


def test_programs_are_told_from_eager_calls():
    def seen(x):
        found.append((portable_path(), values_hidden(x)))
        return x.sum()

    found: list[tuple[bool, bool]] = []
    x = torch.ones(2, 2)
    seen(x)
    seen(x.to("meta"))
    torch.func.grad(seen)(x)
    torch.vmap(seen)(x)
    torch.jit.trace(seen, x, check_trace=False)
    assert found == [(False, False), (False, True), (True, False), (True, True), (True, False)]
