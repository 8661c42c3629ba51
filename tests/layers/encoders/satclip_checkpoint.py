"""A SatCLIP checkpoint in the layout of the released files."""

from typing import Any

import torch


def released(degrees: int = 4, hidden: int = 6, out: int = 5, **hyper_parameters: Any) -> dict[str, Any]:
    """A training checkpoint as Lightning writes it: the location network twice, an image tower, an optimizer."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"layers.0": (hidden, degrees**2), "layers.1": (hidden, hidden), "last_layer": (out, hidden)}
    weights = {"model.logit_scale": torch.tensor(2.7), "model.visual.conv1.weight": torch.zeros(3, 13, 1, 1)}
    for name, shape in shapes.items():
        weight = torch.randn(shape, dtype=torch.float64, generator=generator) / 4
        bias = torch.randn(shape[0], dtype=torch.float64, generator=generator) / 4
        for prefix in ("model.nnet", "model.location.nnet"):
            weights |= {f"{prefix}.{name}.weight": weight, f"{prefix}.{name}.bias": bias}
    sizes = {"legendre_polys": degrees, "capacity": hidden, "embed_dim": out, "num_hidden_layers": 2}
    kinds = {"le_type": "sphericalharmonics", "pe_type": "siren", "harmonics_calculation": "analytic"}
    return {
        "epoch": 499,
        "global_step": 1000,
        "pytorch-lightning_version": "2.0.0",
        "state_dict": weights,
        "optimizer_states": [{"state": {}, "param_groups": [{"lr": 1e-4}]}],
        "hparams_name": "kwargs",
        "hyper_parameters": {"in_channels": 13, "vision_layers": "moco_vit16", **sizes, **kinds, **hyper_parameters},
    }
