"""Upcycling in place with metadata routing: a vision transformer of timm's becomes a MoGE that computes the same.

Blocks have to hand the images' metadata on to the mixtures, so that their forward and the network's are replaced by
those of `GeoMoeVisionTransformer`. That is right where the forwards that are replaced are exactly known: in networks of
timm's class VisionTransformer with blocks of its class Block. What lies in front of the blocks and behind them stays.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from ..errors import MoeLayersError
from ..layers.geo_moe_mlp import GeoMoeMlp
from ._geo_vit import GeoBlock, GeoMoeVisionTransformer
from ._metadata import build_metadata_encoder
from ._moe_vit import MoeLayers, resolve_moe_layers
from .upcycling import check_token_wise, name_of, record_mixture

NAME = "moge"  # what a saved network is built by again


def upcycle_with_metadata(
    model: nn.Module,
    moe_layers: MoeLayers = "last_two",
    num_experts: int = 6,
    top_k: int = 3,
    router_noise: float | None = None,
    expert_drop: float = 0.0,
    expert_perturbation: float = 0.0,
    shared_expert: bool = True,
    metadata_encoder: str | nn.Module = "spherical_harmonics",
    metadata_drop: float = 0.5,
    metadata_features: int | None = None,
    num_locations: int = 323,
    coverage_points: int = 0,
    coverage_radius: float | None = None,
    metadata_columns: Mapping[str, Sequence[float]] | None = None,
) -> GeoMoeVisionTransformer:
    """Replaces feed-forwards of a vision transformer by shared and metadata-routed experts, all copies of them.

    In evaluation the network computes what it did, with metadata and without, unless `expert_perturbation` is above 0.
    Saved by timm, it is loaded again as model 'moge'.

    Args:
        model: Of timm's class VisionTransformer, exactly, with blocks of its class Block; changed in place.
        moe_layers: Which blocks, see `resolve_moe_layers`.
        num_experts: E, beside the shared one.
        top_k: Experts per image.
        router_noise: See `GeoMoeVisionTransformer`, as all that follow.
        expert_drop: Dropout rate of the routed experts.
        expert_perturbation: Relative deviation of the noise on each routed expert's weights.
        shared_expert: Whether mixture blocks have a shared expert.
        metadata_encoder: By name, or a module, which is not recorded.
        metadata_drop: Dropout rate inside 'spherical_harmonics'.
        metadata_features: Width of the embedding.
        num_locations: Number of known locations of 'location_id'.
        coverage_points: Size of the index of training coordinates that comes with the weights.
        coverage_radius: km from them beyond which the shared expert answers alone, in evaluation.
        metadata_columns: Name of a further number -> mean and standard deviation.

    Returns:
        The network itself, which takes images and metadata now.

    Raises:
        MetadataError: Unknown encoder, or a module of unknown width.
        MoeLayersError: Another kind of network, or blocks that it does not have.
        RouterError: See `GeoMoeMlp.from_dense`.
    """
    network: Any = _checked(model)
    layers = resolve_moe_layers(moe_layers, len(network.blocks))
    given: dict[str, Any] = {
        "num_experts": num_experts,
        "top_k": top_k,
        "router_noise": router_noise,
        "expert_drop": expert_drop,
        "expert_perturbation": expert_perturbation,
        "shared_expert": shared_expert,
    }
    weight = network.blocks[0].norm1.weight
    encoder = build_metadata_encoder(
        metadata_encoder,
        num_locations,
        metadata_features,
        metadata_drop,
        weight.device,
        weight.dtype,
        metadata_columns,
    )
    chosen = [network.blocks[index].mlp for index in layers]
    check_token_wise(chosen)
    mixtures = [GeoMoeMlp.from_dense(dense, context_features=encoder.out_features, **given) for dense in chosen]
    for index, mixture in zip(layers, mixtures, strict=True):
        network.blocks[index].mlp = mixture
    for block in network.blocks:
        block.__class__ = GeoBlock
        block.routed = isinstance(block.mlp, GeoMoeMlp)
    network.__class__ = GeoMoeVisionTransformer
    network.route_by(encoder, coverage_points, coverage_radius)
    named = {"metadata_encoder": metadata_encoder} if isinstance(metadata_encoder, str) else {}
    encoding: dict[str, Any] = {
        "metadata_drop": metadata_drop,
        "metadata_features": metadata_features,
        "num_locations": num_locations,
    }
    encoding |= {"metadata_columns": metadata_columns} if metadata_columns else {}
    coverage = {"coverage_points": coverage_points, "coverage_radius": coverage_radius}
    record_mixture(network, NAME, {"moe_layers": list(layers), **given, **named, **encoding, **coverage})
    return network


def _checked(model: nn.Module) -> nn.Module:
    """Refuses a network whose forward is another than the one that will be put in its place.

    Raises:
        MoeLayersError: It is.
    """
    if type(model) is VisionTransformer:
        others = {type(block).__name__ for block in model.blocks if type(block) is not Block}
        if not others:
            return model
        what = f"has blocks of class {', '.join(sorted(others))}"
    else:
        what = f"is of class {type(model).__name__}"
    remedy = (
        f"{what}, which would not hand metadata on to its feed-forwards; choose a network of timm's class "
        "VisionTransformer with plain blocks, such as deit_small_patch16_224 or vit_base_patch16_clip_224, or route by "
        "tokens, with model 'gmoe'"
    )
    raise MoeLayersError.of("model", name_of(model), remedy)
