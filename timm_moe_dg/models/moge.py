"""MoGE: vision transformers with a shared expert and experts routed by metadata, such as where an image was taken.

Mixture of Geographical Experts: Disentangling Earth (Rangzan et al.).
"""

import logging
import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, ClassVar

from timm.models import checkpoint, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from ..errors import MetadataError
from ..layers.compat import update_model_args
from ..layers.encoders.coverage import CELL_RADIUS, Coverage, thin_coordinates
from ..layers.encoders.location import CoordinateEncoder, LocationIdEmbedding
from ..layers.encoders.metadata import MetadataEncoder
from ..layers.geo_moe_mlp import GeoMoeMlp, answers_without_metadata
from ..layers.mixture_options import GeoMixtureOptions, take_options
from .building import IMAGENET_CFG, create_moe_vit, deit_cfg
from .gmoe import MixtureVisionTransformer, MoeLayers, check_vit_options, mixture_block, resolve_moe_layers
from .metadata_options import MetadataRoutingOptions

_logger = logging.getLogger(__name__)

default_cfgs = generate_default_cfgs(
    {
        "moge_tiny.deit_in1k": deit_cfg("tiny"),
        "moge_small_patch32_384.augreg_in21k_ft_in1k": {
            **IMAGENET_CFG,
            "hf_hub_id": "timm/vit_small_patch32_384.augreg_in21k_ft_in1k",
            "input_size": (3, 384, 384),
            "crop_pct": 1.0,
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
        },
    }
)


class GeoBlock(Block):
    """timm's Block, which hands the metadata embedding on if its feed-forward is a `GeoMoeMlp`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.routed = isinstance(self.mlp, GeoMoeMlp)

    def forward(self, x: Tensor, context: Tensor, present: Tensor) -> Tensor:  # type: ignore[override]
        """(B, N, D) tokens, (B, R) metadata embedding, (B,) presence -> (B, N, D)."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        if self.routed:
            return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x), context, present)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class GeoMoeVisionTransformer(MixtureVisionTransformer):
    """Vision transformer whose feed-forward is a `GeoMoeMlp` in some blocks (MoGE, section 2.1).

    `model(images, metadata)` routes; `model(images)` and images whose metadata is missing use the shared expert.
    Everything else is timm's VisionTransformer, arguments included. Attention masks are not supported.

    Args:
        moe_layers: Which blocks, see `resolve_moe_layers`.
        **kwargs: Options of the experts, `timm_moe_dg.layers.GeoMixtureOptions` (`num_experts`, `top_k`,
            `shared_expert`, ...), options of the metadata, `timm_moe_dg.models.MetadataRoutingOptions`
            (`metadata_encoder`, `coverage_radius`, ...), and arguments of timm's VisionTransformer.

    >>> model, images = timm.create_model("moge_tiny", num_classes=62).eval(), torch.randn(2, 3, 224, 224)
    >>> model(images, torch.tensor([[13.4, 52.5], [torch.nan, torch.nan]])).shape  # the second place is unknown
    torch.Size([2, 62])
    """

    option_classes: ClassVar[tuple[type, ...]] = (GeoMixtureOptions, MetadataRoutingOptions)

    def __init__(self, *args: Any, moe_layers: MoeLayers = "last_two", **kwargs: Any) -> None:
        mixture = take_options(GeoMixtureOptions, kwargs)
        metadata = take_options(MetadataRoutingOptions, kwargs)
        check_vit_options(type(self), kwargs)
        encoder = metadata.build_encoder(kwargs.get("device"), kwargs.get("dtype"))
        moe_args = {"options": mixture, "context_features": encoder.out_features}
        layers = resolve_moe_layers(moe_layers, kwargs.get("depth", 12))
        kwargs["block_fn"] = mixture_block(GeoBlock, layers, GeoMoeMlp, moe_args)
        super().__init__(*args, **kwargs)
        # Attached after timm's initialization, which would draw the weights of a given module anew
        self.route_by(encoder, metadata.coverage_points, metadata.coverage_radius)

    def route_by(self, encoder: MetadataEncoder, points: int = 0, radius: float | None = None) -> None:
        """Attaches the metadata encoder, and an index of `points` coordinates with a radius in km."""
        # Calibrations of earlier versions identify networks by the classes of their modules, of which this was one
        self.blocks: Any = nn.ModuleList(self.blocks)
        self.expert_mode: str | int = "routed"
        self.metadata_encoder: MetadataEncoder = encoder
        if points:
            encoder.coverage = Coverage(points, device=next(self.parameters()).device)
        if radius is not None:
            self.set_coverage_radius(radius)

    def set_expert_mode(self, mode: str | int) -> None:
        """Sets which experts predict: 'routed' by metadata, 'shared' alone, or a routed expert by its index."""
        for module in self.modules():
            if isinstance(module, GeoMoeMlp):
                module.set_expert_mode(mode)
        self.expert_mode = mode

    def set_coverage(self, lonlat: Tensor) -> Coverage:
        """Makes an index of the training coordinates, (N, 2) longitude and latitude, which is saved with the weights.

        Coordinates are in degrees, and rows with NaN are left out.
        """
        encoder = self.metadata_encoder
        if not isinstance(encoder.encoder, CoordinateEncoder):
            name = type(encoder.encoder).__name__
            raise MetadataError.of("metadata_encoder", name, "coverage needs an encoder of longitude and latitude")
        points = thin_coordinates(lonlat)
        coverage = Coverage(len(points)).hold(points).to(next(encoder.parameters()).device).train(encoder.training)
        encoder.coverage = coverage
        _logger.info(f"coverage: {len(points)} points stand for {len(lonlat)} training coordinates")
        self._record(coverage_points=len(points), coverage_radius=None)
        return coverage

    def set_seen_locations(self, locations: Iterable[int]) -> None:
        """Sets the ids of the training images. In evaluation, the shared expert answers for all others."""
        encoder: Any = getattr(self.metadata_encoder, "encoder", None)
        if not isinstance(encoder, LocationIdEmbedding):
            raise MetadataError.of("metadata_encoder", type(encoder).__name__, "seen locations need 'location_id'")
        encoder.set_seen(locations)
        self._record(seen_locations=list(encoder.seen_locations))

    def set_coverage_radius(self, radius: float | None) -> None:
        """Sets how far from the training coordinates the router is trusted in evaluation.

        `radius` is in km to the nearest point of the index, the center of a cell of training coordinates. None or
        infinity trusts it everywhere. Any other radius needs an index, and a shared expert to fall back to.
        """
        if radius is not None and not radius >= 0.0:
            raise MetadataError.of("coverage_radius", radius, "give a distance of 0 km or more; inf covers everything")
        radius = None if radius is None or math.isinf(radius) else float(radius)
        coverage = self.metadata_encoder.coverage
        if radius is not None and coverage is None:
            remedy = "the model has no index of training coordinates; finetune.py --coverage-radius makes one"
            raise MetadataError.of("coverage_radius", radius, remedy)
        if radius is not None and not answers_without_metadata(self):
            raise MetadataError.of("coverage_radius", radius, "shared_expert=False leaves no expert to fall back to")
        if radius is not None and radius < CELL_RADIUS:
            text = f"coverage_radius={radius:g}: cells of training coordinates reach {CELL_RADIUS:.0f} km or more"
            _logger.warning(f"{text} from their centers, so that training images may lie outside; give at least that")
        if coverage is not None:
            coverage.radius = radius
        self._record(coverage_radius=radius)

    def _record(self, **options: float | list[int] | None) -> None:
        """Records options for timm's `save_for_hf`; a network on a backbone keeps its own copy of them."""
        update_model_args(self, **options)
        getattr(self, "mixture_args", {}).update(options)

    def forward_features(self, x: Tensor, metadata: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """(B, C, height, width) images and their metadata -> (B, N, D) normalized tokens."""
        context, present = self.metadata_encoder(x, metadata)
        x = self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))
        for block in self.blocks:
            x = checkpoint(block, x, context, present) if self.grad_checkpointing else block(x, context, present)
        return self.norm(x)

    def forward(self, x: Tensor, metadata: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """(B, C, height, width) images and their metadata -> (B, num_classes) logits."""
        return self.forward_head(self.forward_features(x, metadata))

    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> list[int]:
        """Prunes as timm does. Without a routed block, the metadata encoder goes too."""
        remaining: list[int] = super().prune_intermediate_layers(*args, **kwargs)
        if not any(block.routed for block in self.blocks):
            self.metadata_encoder.encoder = nn.Identity()
        return remaining

    def forward_intermediates(self, x: Tensor, *args: Any, metadata: Tensor | None = None, **kwargs: Any) -> Any:
        """Returns features after chosen blocks, as timm does, with the images' metadata as a further argument.

        Gradient checkpointing and attention masks are not supported here.
        """
        encoded = self.metadata_encoder(x, metadata)
        with ExitStack() as hooks:
            for block in self.blocks:
                # timm's loop hands the tokens on alone
                hooks.callback(block.register_forward_pre_hook(lambda _, tokens: (*tokens, *encoded)).remove)
            return super().forward_intermediates(x, *args, **kwargs)


@register_model
def moge_tiny(pretrained: bool = False, **kwargs: Any) -> GeoMoeVisionTransformer:
    """MoGE on DeiT-Ti/16 with coordinates, the paper's FMoW model. Options are those of `GeoMoeVisionTransformer`."""
    model_args = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3, **kwargs}
    return create_moe_vit(GeoMoeVisionTransformer, "moge_tiny", pretrained, **model_args)


@register_model
def moge_small_patch32_384(pretrained: bool = False, **kwargs: Any) -> GeoMoeVisionTransformer:
    """MoGE-S/32 for iWildCam's 323 location ids; the paper has 448 px. Options: those of `GeoMoeVisionTransformer`."""
    model_args = {"patch_size": 32, "embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs}
    model_args = {"metadata_encoder": "location_id", **model_args}
    return create_moe_vit(GeoMoeVisionTransformer, "moge_small_patch32_384", pretrained, **model_args)
