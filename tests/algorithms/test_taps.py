"""Taps on features leave the network a network."""

from tests.algorithms.networks import minibatches, network
from tests.algorithms.test_updates import build, train


def test_a_network_that_is_tapped_can_be_copied_and_its_copy_is_a_network_of_its_own():
    from copy import deepcopy

    net = network("mlp")
    algorithm, context = build("CORAL", net)
    train(algorithm, context, "mlp", range(1))
    copy = deepcopy(net)
    copy.train()(minibatches("mlp", 0)[0][0])
    assert algorithm._features._stored is None
    net.eval()(minibatches("mlp", 0)[0][0])
    assert algorithm._features._stored is None
