"""Pictures of associations and of statistics with their nulls are drawn for any number of experts and names."""

import pytest
import torch
from PIL import Image

from timm_moe_dg.analysis.routing_report import plot_association, plot_nulls
from timm_moe_dg.analysis.routing_statistics import associate_parts

LONG = "a name that goes on and on, as those of folders and of classes of birds sometimes do in fact"


@pytest.mark.parametrize("num_experts", [1, 10, 16])
def test_tables_with_empty_rows(num_experts, tmp_path):
    members = torch.zeros(2, 3, 8, dtype=torch.bool)
    members[:, 0, :4] = members[:, 1, 4:] = True  # the third part is nowhere
    first = torch.arange(16).view(2, 8) % num_experts
    parts = associate_parts(members, ("left eye", LONG, "right eye"), first, num_experts, 9)
    plot_association(parts, LONG, tmp_path / "table.png")
    plot_nulls({LONG: parts.nmi, "b": parts.nmi}, "NMI", tmp_path / "nulls.png", {"b": 0.5})
    assert all(Image.open(tmp_path / f"{name}.png").width > 300 for name in ("table", "nulls"))
