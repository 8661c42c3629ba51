"""The training loop against Adam by hand, and what it leaves alone."""

import torch
from torch import nn

from timm_moe_dg.analysis.fitting import answers, fit


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


def test_weights_equal_those_of_adam_on_the_same_batches():
    torch.manual_seed(0)
    inputs, targets = torch.randn(20, 3), torch.randn(20, 2)
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    reference.load_state_dict(model.state_dict())
    order, same = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    epochs = list(fit(model, inputs, targets, squares, epochs=3, generator=order, batch_size=8, lr=0.01))
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01, fused=False)
    for _ in range(3):
        permutation = torch.randperm(20, generator=same)
        for batch in (permutation[:8], permutation[8:16], permutation[16:]):
            optimizer.zero_grad()
            squares(reference(inputs[batch]), targets[batch]).backward()
            optimizer.step()
    assert epochs == [1, 2, 3]
    torch.testing.assert_close(model.weight, reference.weight, rtol=1e-4, atol=1e-6)


def test_an_epoch_trains_in_training_mode_though_the_caller_looks_in_evaluation_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    modes = []
    model.register_forward_hook(lambda module, *_: modes.append(module.training))
    for _ in fit(model, torch.randn(4, 2), torch.randn(4, 2), squares, epochs=2, generator=torch.Generator()):
        assert not answers(model, torch.randn(3, 2)).requires_grad
    assert modes == [True, False, True, False]
