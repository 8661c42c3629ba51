"""Agreement of groupings: by hand and against scikit-learn."""

import pytest
import torch
from sklearn.metrics import normalized_mutual_info_score

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.metrics import normalized_mutual_information


@pytest.mark.parametrize("seed", range(3))
def test_agreement_equals_scikit_learns(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 5, (80,), generator=generator)
    second = torch.where(torch.rand(80, generator=generator) < 0.6, first * 7 - 3, 40 + first // 2)
    expected = normalized_mutual_info_score(first.numpy(), second.numpy())
    assert normalized_mutual_information(first, second).item() == pytest.approx(expected, abs=1e-12)


def test_agreement_at_its_ends() -> None:
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    assert normalized_mutual_information(labels, 5 - labels).item() == pytest.approx(1.0, abs=1e-12)
    # every combination once: independent
    assert normalized_mutual_information(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])).item() == 0.0
    assert normalized_mutual_information(torch.zeros(4), labels[:4]).item() == 0.0
    assert normalized_mutual_information(torch.zeros(4), torch.ones(4)).item() == 1.0
    assert normalized_mutual_information(torch.zeros(0), torch.zeros(0)).isnan()
    with pytest.raises(ArgumentError, match="first, second"):
        normalized_mutual_information(torch.zeros(2), torch.zeros(3))
