"""D3G, the baseline with a head for each training domain (Yao et al., 2024; MoGE, table 1).

The form is that of Crasto (2025), whose D3G+WRAP is the other row of the table. A prediction is the mean of the heads'
logits, weighted by the relations of the image's place to their domains. In training, an image's own head predicts, and
the mean of the other heads has a loss of its own.

Axes: B samples, M training domains, D features, C classes, P points of the index.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..errors import ArgumentError, MetadataError
from ..layers.compat import update_model_args
from ..layers.encoders.coverage import Coverage, thin_coordinates
from ..layers.encoders.location import CoordinateEncoder
from ..layers.encoders.metadata import MetadataEncoder
from ..layers.mixture_options import take_options
from ..layers.parameters import OwnParameters, UpcastLinear, undecayed_parameters, upcast
from ..layers.reports import LossWeights, ReportedLoss
from .building import check_complete, create_moe_vit, deit_cfg, fit_dense
from .gmoe import check_vit_options

RELATION_QUERIES = ("domain", "wrap")
_RELATIONS = "metadata_encoder.encoder."

_logger = logging.getLogger(__name__)

default_cfgs = generate_default_cfgs({"d3g_tiny_patch16.deit_in1k": deit_cfg("tiny")})


@dataclass(frozen=True, kw_only=True)
class DomainHeadOptions:
    """Options of `DomainHeadsVisionTransformer`."""

    num_domains: int = 5  # training domains, each with a head
    relation_beta: float = 0.8  # weight of the fixed relation beside the learned one
    relation_query: str = "domain"  # or 'wrap' to learn relations from the coordinates (D3G+WRAP)
    consistency_coef: float = 0.5  # weight of the loss of the other heads
    index_points: int = 0  # size of the index of training coordinates that comes with the weights
    domain_names: Sequence[str] | None = None  # of the heads' domains, None if they are not known

    def __post_init__(self) -> None:
        if self.num_domains < 2:
            raise ArgumentError.of("num_domains", self.num_domains, "D3G needs at least two training domains")


class DomainHeads(OwnParameters):
    """One linear classifier for each training domain, on the same features (D3G, section 3.1).

    Further arguments are the device and the dtype.
    """

    undecayed = ("bias",)
    stacked = MappingProxyType({"weight": 1, "bias": 1})

    def __init__(self, in_features: int, num_domains: int, num_classes: int, **dd: Any) -> None:
        super().__init__()
        # Classes come first, because timm reads their number from a classifier's first axis
        self.weight = nn.Parameter(torch.empty(num_classes, num_domains, in_features, **dd))
        self.bias = nn.Parameter(torch.empty(num_classes, num_domains, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(D), as in torch's linear layers."""
        bound = self.weight.shape[-1] ** -0.5
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., M, C) logits of every head."""
        return torch.einsum("...d,cmd->...mc", x, self.weight) + self.bias.T


class DomainRelations(CoordinateEncoder):
    """How much a place is related to each training domain (D3G, section 3.2).

    The relation to domain i is beta [i = d] + (1 - beta) cos(w * q, w * g(i)). The place belongs to domain d. In
    training the data state it, in a third column of the metadata. Without that column it is the domain of the nearest
    training coordinate in an index. A small network g reads the domain's number. The query q is g(d), or for 'wrap' a
    network of the sine and cosine of longitude and latitude, and w is a learned vector.

    Crasto (2025) has this form, with one vector w where D3G has several. Its code reads d from the data set's table.

    Args:
        num_domains: M.
        num_points: P; the points are set by `set_domains` or loaded from a checkpoint.
        beta: Weight of the fixed relation [i = d].
        query: 'domain' or 'wrap'.
    """

    owners: Tensor  # domain of each point
    numbers: Tensor | None  # of each domain for g; None for 0 to M - 1

    def __init__(
        self,
        num_domains: int,
        num_points: int = 0,
        *,
        beta: float = 0.8,
        query: str = "domain",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if query not in RELATION_QUERIES:
            raise MetadataError.of("relation_query", query, f"choose one of {RELATION_QUERIES}")
        if not 0 <= beta <= 1:
            raise MetadataError.of("relation_beta", beta, "give a share from 0 to 1")
        self.num_domains, self.beta = num_domains, beta
        self.out_features = 2 * num_domains
        self.register_buffer("owners", torch.zeros(0, dtype=torch.int64, device=device))
        self.register_buffer("numbers", None)
        self.allocate(num_points)

        def network(inputs: int) -> nn.Sequential:
            first = UpcastLinear(inputs, 128, device=device, dtype=dtype)
            return nn.Sequential(first, nn.ReLU(), UpcastLinear(128, 256, device=device, dtype=dtype))

        self.keys = network(1)
        self.queries = network(4) if query == "wrap" else None
        self.scale = nn.Parameter(torch.empty(256, device=device, dtype=dtype))
        nn.init.uniform_(self.scale)

    def reset_parameters(self) -> None:
        """The default of torch for the networks, and uniform from 0 to 1 for w."""
        for layer in (*self.keys, *(self.queries or ())):
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        nn.init.uniform_(self.scale)

    def allocate(self, num_points: int, numbers: Tensor | None = None) -> None:
        """Makes room for an index of P points, and sets the numbers of the domains."""
        self.index = Coverage(num_points, device=self.owners.device).train(self.training)
        self.owners = self.owners.new_zeros(num_points)
        self.numbers = None if numbers is None else numbers.to(self.owners.device)

    def set_domains(self, lonlat: Sequence[Tensor]) -> int:
        """Makes the index from the (N, 2) training coordinates of each domain, in degrees; returns P."""
        points = [thin_coordinates(part) for part in lonlat]
        owners = torch.arange(len(points)).repeat_interleave(torch.tensor([len(part) for part in points]))
        self.allocate(len(owners), self.numbers)
        self.index.hold(torch.cat(points))
        self.owners.copy_(owners)
        return len(owners)

    def check(self, metadata: Tensor) -> None:
        """Checks the coordinates, and that no domain is stated which has no head."""
        super().check(metadata[:, :2] if metadata.ndim == 2 and metadata.shape[1] == 3 else metadata)
        if metadata.shape[1] == 3 and metadata.device.type == "cpu" and len(metadata):
            largest = metadata[:, 2].nan_to_num(nan=0.0).max().item()
            if largest >= self.num_domains:
                raise MetadataError.of("domain", largest, f"give numbers 0..{self.num_domains - 1}, or NaN for unknown")

    def present(self, metadata: Tensor) -> Tensor:
        """(B, 2 or 3) -> (B,) bool, True where the domain can be found: known coordinates, and an index."""
        return super().present(metadata[:, :2]) & (len(self.owners) > 0)

    def forward(self, metadata: Tensor) -> Tensor:
        """(B, 2 or 3) degrees, and the domain or NaN -> (B, 2 M): the relations, then the fixed ones, [i = d]."""
        if not len(self.owners):
            return torch.zeros(len(metadata), self.out_features, device=metadata.device, dtype=self.scale.dtype)
        lonlat = metadata[:, :2]
        domain = self.owners[self.index.nearest(lonlat)]
        if metadata.shape[1] == 3:
            stated = metadata[:, 2]
            domain = torch.where(stated.isnan(), domain, stated.nan_to_num(nan=0.0).long())
        fixed = F.one_hot(domain, self.num_domains).to(self.scale.dtype)
        numbers = torch.arange(self.num_domains, device=metadata.device) if self.numbers is None else self.numbers
        keys = self.keys(numbers.to(self.scale.dtype).unsqueeze(1))
        if self.queries is None:
            queries = keys[domain]
        else:
            angles = torch.deg2rad(lonlat.double())
            queries = self.queries(torch.cat([angles.cos(), angles.sin()], dim=1).to(self.scale.dtype))
        learned = F.cosine_similarity((self.scale * queries).unsqueeze(1), self.scale * keys, dim=-1)
        return torch.cat([self.beta * fixed + (1 - self.beta) * learned, fixed], dim=1)


class DomainHeadsVisionTransformer(VisionTransformer):
    """Vision transformer with a classifier for each training domain.

    For an image without metadata, all heads count alike. `forward_features` takes the image alone, `forward_head` the
    metadata. Arguments are those of timm's VisionTransformer and options of `DomainHeadOptions`.
    """

    option_classes: ClassVar[tuple[type, ...]] = (DomainHeadOptions,)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = take_options(DomainHeadOptions, kwargs)
        check_vit_options(type(self), kwargs)
        super().__init__(*args, **kwargs)
        relations = DomainRelations(
            options.num_domains,
            options.index_points,
            beta=options.relation_beta,
            query=options.relation_query,
            device=kwargs.get("device"),
            dtype=kwargs.get("dtype"),
        )
        self.num_domains, self.consistency_coef = options.num_domains, options.consistency_coef
        self.metadata_encoder = MetadataEncoder(relations)
        self.head: Any  # timm declares a linear layer
        self.other_logits: Tensor | None = None  # of the last forward in training
        self.reset_classifier(self.num_classes)

    def no_weight_decay(self) -> set[str]:
        """Names timm's parameters without weight decay, and the heads' biases."""
        return super().no_weight_decay() | undecayed_parameters(self)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces all heads."""
        super().reset_classifier(num_classes, global_pool)
        if num_classes:
            weight = self.patch_embed.proj.weight
            sizes = (self.num_features, self.num_domains, num_classes)
            self.head = DomainHeads(*sizes, device=weight.device, dtype=weight.dtype).train(self.training)

    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> list[int]:
        """Prunes as timm does. Without heads, the relations go too."""
        remaining: list[int] = super().prune_intermediate_layers(*args, **kwargs)
        if not self.num_classes:
            self.metadata_encoder.encoder = nn.Identity()
        return remaining

    @torch.no_grad()
    def renew_domains(self, before: Sequence[str], names: Sequence[str]) -> None:
        """Gives a network with the domains `before` those of `names`, whose coordinates `set_domains` sets.

        Heads and relations of domains are kept by name. New domains get new heads, and numbers that g has not learned.
        """
        relations, old_head = self.metadata_encoder.encoder, self.head
        numbers = list(range(len(before))) if relations.numbers is None else relations.numbers.tolist()
        old_columns = {column: before.index(name) for column, name in enumerate(names) if name in before}
        unused = itertools.count(max(numbers) + 1)
        numbers = [
            numbers[old_columns[column]] if column in old_columns else next(unused) for column in range(len(names))
        ]
        self.num_domains = relations.num_domains = len(names)
        relations.out_features = self.metadata_encoder.out_features = 2 * len(names)
        # Usual numbers are in no checkpoint
        relations.allocate(0, None if numbers == list(range(len(names))) else torch.tensor(numbers))
        self.reset_classifier(self.num_classes)
        for key, value in self.head.named_parameters():
            value[:, list(old_columns)] = old_head.get_parameter(key)[:, list(old_columns.values())]
        update_model_args(self, num_domains=len(names), index_points=0)
        carried, new = (", ".join(name for name in names if (name in before) is known) for known in (True, False))
        _logger.info(f"heads of domains that are kept, by name: {carried or 'none'}; new: {new or 'none'}")

    def set_domains(self, lonlat: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
        """Makes the index that finds the domain of a place from the (N, 2) training coordinates of each domain."""
        if len(lonlat) != self.num_domains:
            remedy = f"the run has {len(lonlat)} training domains; give --model-kwargs num_domains={len(lonlat)}"
            raise ArgumentError.of("num_domains", self.num_domains, remedy)
        index_points = self.metadata_encoder.encoder.set_domains(lonlat)
        update_model_args(self, index_points=index_points, domain_names=names and list(names))

    def forward_head(self, x: Tensor, pre_logits: bool = False, metadata: Tensor | None = None) -> Tensor:
        """Pools (B, N, D) features and weights the heads by the relations of the metadata, or None.

        Metadata are (B, 2) longitude and latitude, and in training (B, 3) with the number of the image's domain.
        Returns (B, num_classes) logits, or with `pre_logits` the (B, D) classifier inputs. Without pooling, both keep
        N.
        """
        x = super().forward_head(x, pre_logits=True)
        if pre_logits or not self.num_classes:
            return x
        logits = self.head(x)
        encoded, present = self.metadata_encoder(x, metadata)
        known = present.unsqueeze(1)
        if self.global_pool == "":
            encoded, known = encoded.unsqueeze(1), known.unsqueeze(1)
        relations, own = encoded.chunk(2, dim=-1)
        if not self.training:
            return self._mean(logits, torch.where(known, relations, 1.0))
        self.other_logits = self._mean(logits, torch.where(known, relations * (1 - own), 1.0))
        return self._mean(logits, torch.where(known, own, 1.0))

    def training_losses(self, targets: Tensor, weights: LossWeights) -> dict[str, ReportedLoss]:
        """Returns the cross-entropy of the heads of other domains (D3G, equation 3)."""
        logits, self.other_logits = self.other_logits, None  # the next forward must not find an old graph
        if logits is None:
            return {}
        return {"consistency_loss": ReportedLoss(F.cross_entropy(upcast(logits), targets), self.consistency_coef)}

    def __getstate__(self) -> dict[str, object]:
        return dict(self.__dict__, other_logits=None)  # belongs to a graph, and can be neither copied nor pickled

    def _mean(self, logits: Tensor, weights: Tensor) -> Tensor:
        """(..., M, C) and (..., M) -> (..., C)."""
        return (logits * weights.unsqueeze(-1)).sum(-2) / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor, metadata: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """(B, C, height, width) images and their metadata -> (B, num_classes) logits."""
        return self.forward_head(self.forward_features(x), metadata=metadata)


def _filter_fn(state_dict: dict[str, Tensor], model: DomainHeadsVisionTransformer) -> dict[str, Tensor]:
    """Fits a checkpoint to the model; every head starts as a copy of a dense classifier."""
    loaded = fit_dense(state_dict, model, ("metadata_encoder.",))
    for name, dims in (("head.weight", 2), ("head.bias", 1)):
        if name in loaded and loaded[name].ndim == dims:
            loaded[name] = torch.stack([loaded[name]] * model.num_domains, dim=1)
    relations = model.metadata_encoder.encoder
    relations.allocate(len(loaded[f"{_RELATIONS}owners"]), loaded.get(f"{_RELATIONS}numbers"))
    check_complete(loaded, model)
    return loaded


@register_model
def d3g_tiny_patch16(pretrained: bool = False, **kwargs: Any) -> DomainHeadsVisionTransformer:
    """DeiT-Ti/16 with five heads, a baseline of moge_tiny. Options are those of `DomainHeadsVisionTransformer`."""
    model_args = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3, **kwargs}
    model = create_moe_vit(DomainHeadsVisionTransformer, "d3g_tiny_patch16", pretrained, _filter_fn, **model_args)
    if isinstance(model, DomainHeadsVisionTransformer):  # and none of timm's wrappers
        update_model_args(model, index_points=len(model.metadata_encoder.encoder.owners))
    return model
