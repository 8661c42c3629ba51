"""SF-MoE: vision transformers that alternate sparse (mixture) and fusion (dense) blocks, linearly routed.

Sparse Fusion Mixture-of-Experts are Domain Generalizable Learners (Li et al., 2022), an earlier form of GMoE.

The released code differs from the paper: distilled DeiT-S, mixtures in blocks 5 and 11, 4 experts. That placement is
`moe_layers=(5, 11), num_experts=4`.
"""

from typing import Any

from timm.models import generate_default_cfgs, register_model

from ._build import create_moe_vit, deit_cfg
from ._moe_vit import MoeVisionTransformer

default_cfgs = generate_default_cfgs({"sfmoe_small.deit_in1k": deit_cfg("small", paper_ids="arXiv:2206.04046")})


@register_model
def sfmoe_small(pretrained: bool = False, **kwargs: Any) -> MoeVisionTransformer:
    """SF-MoE on DeiT-S/16: [S, F] x 6, six experts, top-2. Options are those of `MoeVisionTransformer`."""
    mixture = {"moe_layers": "every_two", "num_experts": 6, "top_k": 2, "router": "linear", "expert_drop": 0.1}
    model_args = {**mixture, "patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs}
    return create_moe_vit(MoeVisionTransformer, "sfmoe_small", pretrained, **model_args)
