"""What methods, routers and averages carry from step to step is in their state."""

import io

import pytest
import torch

from tests.algorithms.networks import BALANCED, build, minibatches, network, train
from timm_moe_dg.algorithms import ALGORITHMS, AVERAGING

AVERAGES = {
    "ema": {"ema_decay": 0.5},
    "moving": {"sma_start_iter": 2},
    "swad": {"swad_n_converge": 2, "swad_n_tolerance": 3},
    "swad_released": {"swad_n_converge": 2, "swad_n_tolerance": 3},
}
# Penalties set in between two stops. The loss settles, rises and falls again, and one step has no evaluation
ANNEALED = dict.fromkeys(("irm_penalty_anneal_iters", "vrex_penalty_anneal_iters"), 4)
ANNEALED |= dict.fromkeys(("penalty_anneal_iters", "rdm_penalty_anneal_iters"), 4)
LOSSES = [5.0, None, 3.0, 3.5, 9.0, 9.0, 3.1]


def through_checkpoint(module):
    """The state of a module as a checkpoint holds it."""
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class Run:
    """A method, a network and every average of it, as a run has them."""

    def __init__(self, method, kind):
        self.method, self.kind, self.net = method, kind, network(kind)
        self.averages = {name: AVERAGING[name](self.net, hparams) for name, hparams in AVERAGES.items()}
        self.algorithm, self.context = build(method, self.net, **ANNEALED)
        self.parts = {"net": self.net, "algorithm": self.algorithm, "moments": self.context.optimizer, **self.averages}

    def step(self, step):
        torch.manual_seed(step)
        losses = self.algorithm.take_step(self.context, minibatches(self.kind, step))
        for average in self.averages.values():
            average.update(self.net, step)
        return {name: loss.item() for name, loss in losses.items()}

    def evaluated(self, step):
        for average in self.averages.values() if LOSSES[step] else ():
            average.evaluated(step, LOSSES[step])

    def resumed(self):
        """Goes on in new objects from a checkpoint."""
        run = Run(self.method, self.kind)
        with torch.no_grad():
            for parameter in run.algorithm.parameters():
                parameter.zero_()  # whatever it starts with is overwritten
        for name, part in run.parts.items():
            part.load_state_dict(through_checkpoint(self.parts[name]))
        return run

    def weights(self):
        """The state of the network, the method and the averages, as tensors by name."""
        averages = [look() for average in self.averages.values() for look in (average.during, average.final)]
        modules = [self.net, self.algorithm, *(average for average in averages if average is not None)]
        tables = enumerate(module.state_dict() for module in modules)
        return {(part, k): v for part, table in tables for k, v in table.items() if isinstance(v, torch.Tensor)}


# Methods with one forward in a step, with steps of two kinds, and with inner steps
FAST = [*((method, "mlp") for method in ALGORITHMS), ("ERM", "thresholds"), ("DANN", "bias"), ("Fish", "bias")]
SLOW = [(method, kind) for method in ALGORITHMS for kind in BALANCED if (method, kind) not in FAST]


@pytest.mark.parametrize(("method", "kind"), [*FAST, *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW)])
def test_a_run_that_stops_after_every_step_is_the_run_without_a_stop(method, kind):
    straight, stopped = Run(method, kind), Run(method, kind)
    for step in range(len(LOSSES)):
        assert stopped.step(step) == straight.step(step)
        stopped = stopped.resumed()
        for run in (straight, stopped):
            run.evaluated(step)
        expected, weights = straight.weights(), stopped.weights()
        assert weights.keys() == expected.keys()
        assert not [name for name, value in weights.items() if not torch.equal(value, expected[name])]


def test_the_frozen_copy_is_not_in_miro_s_state_but_follows_its_device_and_type():
    algorithm, context = build("MIRO", network("mlp"))
    train(algorithm, context, "mlp", range(1))
    assert set(algorithm.state_dict()) == {"b.0", "b.1"}
    assert next(algorithm._reference[0].parameters()).dtype == torch.float64
    assert next(algorithm.to("meta")._reference[0].parameters()).device.type == "meta"
