"""What methods and averages carry from step to step: three steps, saved and loaded, and three more are six steps."""

import io

import pytest
import torch

from tests.algorithms.networks import build, network, train
from timm_moe_dg.algorithms import ALGORITHMS, AVERAGING

AVERAGES = {
    "ema": {"ema_decay": 0.5},
    "moving": {"sma_start_iter": 2},
    "swad": {"swad_n_converge": 2, "swad_n_tolerance": 3},
    "swad_released": {"swad_n_converge": 2, "swad_n_tolerance": 3},
}


def through_checkpoint(module):
    """The state of a module as a checkpoint holds it."""
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_method_goes_on_from_its_state(method):
    """The state is taken after step 2: annealing, GroupDRO's weights, Fishr's averages, discriminators matter later."""
    hparams = {"irm_penalty_anneal_iters": 4, "vrex_penalty_anneal_iters": 4, "penalty_anneal_iters": 4}
    hparams |= {"rdm_penalty_anneal_iters": 4}
    straight = network("mlp")
    expected = train(*build(method, straight, **hparams), "mlp", range(6))

    net = network("mlp")
    algorithm, context = build(method, net, **hparams)
    train(algorithm, context, "mlp", range(3))
    states = [through_checkpoint(module) for module in (net, algorithm)]
    moments = context.optimizer.state_dict()

    resumed = network("mlp")
    algorithm, context = build(method, resumed, **hparams)
    with torch.no_grad():
        for parameter in algorithm.parameters():
            parameter.zero_()  # whatever it starts with is overwritten
    resumed.load_state_dict(states[0])
    algorithm.load_state_dict(states[1])
    context.optimizer.load_state_dict(moments)
    losses = train(algorithm, context, "mlp", range(3, 6))
    for (name, value), other in zip(resumed.named_parameters(), straight.parameters(), strict=True):
        assert torch.equal(value, other), name
    assert {name: value.item() for name, value in losses.items()} == {k: v.item() for k, v in expected.items()}


@pytest.mark.parametrize("name", AVERAGING)
def test_an_average_goes_on_from_its_state(name):
    losses = [5.0, 3.0, 3.5, 3.2, 9.0, 9.0, 3.1]  # converges at the third evaluation, waits at the fifth and sixth

    def run(average, net, steps):
        for step in steps:
            torch.manual_seed(step)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(torch.randn_like(parameter))
            average.update(net, step)
            if step % 2 == 0:
                average.evaluated(step, losses[step // 2])

    def start():
        net = network("mlp")
        return AVERAGING[name](net, AVERAGES[name]), net

    straight, net = start()
    run(straight, net, range(14))
    for cut in (1, 2, 3, 5, 8, 11):
        first, other = start()
        run(first, other, range(cut))
        states = [through_checkpoint(module) for module in (first, other)]
        second, resumed = start()
        second.load_state_dict(states[0])
        resumed.load_state_dict(states[1])
        run(second, resumed, range(cut, 14))
        for look in ("during", "final"):
            expected, resumed_average = getattr(straight, look)(), getattr(second, look)()
            assert (expected is None) == (resumed_average is None)
            if expected is not None:
                for value, other in zip(resumed_average.parameters(), expected.parameters(), strict=True):
                    assert torch.equal(value, other), (cut, look)


def test_the_frozen_copy_is_not_in_miro_s_state_but_follows_its_device_and_type():
    algorithm, context = build("MIRO", network("mlp"))
    train(algorithm, context, "mlp", range(1))
    assert set(algorithm.state_dict()) == {"b.0", "b.1"}
    assert next(algorithm._reference[0].parameters()).dtype == torch.float64
    assert next(algorithm.to("meta")._reference[0].parameters()).device.type == "meta"
