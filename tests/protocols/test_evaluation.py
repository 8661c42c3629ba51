"""Evaluation: predictions in order, accuracies by hand, the network's mode untouched."""

import math

import pytest
import torch
from torch import nn

from timm_moe_dg.protocols import Predictions, domain_accuracies, out_losses, predict


class Says(nn.Module):
    """Puts the largest logit where the image's first pixel says; in training mode it is always wrong."""

    def forward(self, images):
        assert not torch.is_grad_enabled()
        said = images[:, 0, 0, 0].long()
        return nn.functional.one_hot(said if not self.training else (said + 1) % 4, 4).float()


def batch(said, targets, groups):
    images = torch.tensor(said, dtype=torch.float)[:, None, None, None].expand(-1, 3, 2, 2)
    return images, torch.tensor(targets), torch.tensor(groups)


BATCHES = [batch([0, 1, 2], [0, 1, 1], [0, 0, 1]), batch([3, 3], [3, 0], [4, 4])]


@pytest.mark.parametrize("training", [True, False])
def test_predictions_are_made_in_evaluation_mode_which_is_then_left(training):
    network = Says().train(training)
    predictions = predict(network, BATCHES)
    assert predictions.predicted.tolist() == [0, 1, 2, 3, 3]
    assert predictions.target.tolist() == [0, 1, 1, 3, 0]
    assert predictions.group.tolist() == [0, 0, 1, 4, 4]
    assert network.training is training


def test_mode_is_restored_after_an_error():
    def broken():
        yield BATCHES[0]
        raise OSError("disk")

    network = Says().train()
    with pytest.raises(OSError, match="disk"):
        predict(network, broken())
    assert network.training


def test_gather_sees_every_batch_and_decides_what_counts():
    def first_only(tensors):
        return tuple(tensor[:1] for tensor in tensors)

    assert predict(Says(), BATCHES, first_only).predicted.tolist() == [0, 3]


def test_accuracies_by_domain_and_split():
    in_acc, out_acc = domain_accuracies(predict(Says(), BATCHES), num_domains=3)
    assert in_acc[0] == 1.0
    assert in_acc[2] == 0.5
    assert out_acc[0] == 0.0
    assert math.isnan(in_acc[1])
    assert all(math.isnan(value) for value in out_acc[1:])


def test_losses_on_out_splits_are_means_of_cross_entropies():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.5, 0.0], [1.0, 1.0, 1.0]])
    target, group = torch.tensor([0, 2, 1]), torch.tensor([1, 1, 2])
    predictions = predict(nn.Identity(), [(logits, target, group)])
    each = [
        -math.log(math.exp(row[at]) / sum(map(math.exp, row))) for row, at in zip(logits.tolist(), target, strict=True)
    ]
    first, second = out_losses(predictions, num_domains=2)
    assert first == pytest.approx((each[0] + each[1]) / 2, rel=1e-6)
    assert math.isnan(second)


def test_modules_that_do_not_train_stay_so():
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    network[0].eval()
    predict(network, [(torch.randn(4, 3), torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long))])
    assert [module.training for module in network.modules()] == [True, False, True]


def test_groups_beyond_the_domains_are_refused():
    one = torch.tensor([0])
    with pytest.raises(ValueError, match=r"group=.*choose indices from 0"):
        domain_accuracies(Predictions(one, one, torch.tensor([6]), one), num_domains=3)
