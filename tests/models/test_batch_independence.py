"""A prediction depends on its image, never on the images beside it."""

import torch

from tests.models.cases import randomize

TOLERANCE = 1e-6


@torch.no_grad()
def test_logits_of_an_image_are_the_same_alone_in_a_batch_and_in_any_order(case):
    # a training capacity, where the family has one, must not hold in evaluation
    options = {} if case.metadata else {"capacity_factor": 0.5}
    model = randomize(case.small(**options)).eval()
    inputs = case.inputs(8)
    together = model(*inputs)
    alone = torch.cat([model(*(column[index : index + 1] for column in inputs)) for index in range(8)])
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    permuted = model(*(column[order] for column in inputs))
    torch.testing.assert_close(alone, together, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(permuted, together[order], rtol=0, atol=TOLERANCE)
