"""Options of mixture layers, declared once for the layers and for every network that contains them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from ..errors import OptionError, RouterError, did_you_mean

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True, kw_only=True)
class MixtureOptions:
    """Options of token-routed experts, for `MoeMlp`, `MoeVisionTransformer` and `upcycle`.

    Attributes:
        num_experts: Number of experts (E).
        top_k: Experts per token (K), 1 to E.
        router: 'cosine', 'linear', 'random', 'self', or a name given to `register_router`.
        router_kwargs: Options of the router. They are `scores`, `choice`, `bias_speed` and `threshold_decay`, see
            `timm_moe_dg.layers.Router`. The cosine router has `proj_features` as well.
        capacity_factor: Limit on an expert's tokens in training, relative to an equal share. Of T tokens an expert
            takes at most K * floor(capacity_factor * ceil(T / E)), by batch prioritized routing. None drops no token.
            Evaluation never drops any.
        normalize_weights: Whether the combine weights of a token sum to 1. None means top_k > 1.
        router_noise: Standard deviation of the noise on training logits. None means 1 / E.
        expert_drop: Dropout rate inside the experts. A `MoeMlp` built by itself has 0.
        expert_width: Width of an expert relative to the dense feed-forward. At most 1. Below are fine-grained experts
            (DeepSeekMoE, arXiv:2401.06066, section 3.1): with 0.5, give twice as many experts and twice the `top_k`.
            Upcycled ones are parts of the dense one, scaled by its width over theirs, and equal it on average alone.
        expert_reinit: Share of each expert's hidden units that upcycling draws again. This is r of Drop-Upcycling
            (arXiv:2502.19261, section 3), 0.5 there. The units' weights get normal numbers with the mean and the
            standard deviation of what they replace.
        shared_expert: Whether there is a shared expert. An upcycled one is the dense feed-forward, see `MoeMlp`.

    >>> model = timm.create_model("gmoe_tiny_patch16", router="linear", capacity_factor=1.5)
    """

    num_experts: int = 6
    top_k: int = 2
    router: str = "cosine"
    router_kwargs: Mapping[str, object] | None = None
    capacity_factor: float | None = None
    normalize_weights: bool | None = None
    router_noise: float | None = None
    expert_drop: float = 0.1
    expert_width: float = 1.0
    expert_reinit: float = 0.0
    shared_expert: bool = False
    expert_perturbation: ClassVar[float] = 0.0  # an option of `GeoMixtureOptions` alone

    def __post_init__(self) -> None:
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            remedy = "give a positive factor, or None for dropless"
            raise RouterError.of("capacity_factor", self.capacity_factor, remedy)
        choice = (self.router_kwargs or {}).get("choice", "token")
        if self.capacity_factor is not None and choice != "token":
            remedy = f"choice={choice!r} limits experts by itself; leave it None"
            raise RouterError.of("capacity_factor", self.capacity_factor, remedy)
        if not 0 < self.expert_width <= 1:
            raise RouterError.of("expert_width", self.expert_width, "give a share above 0, and at most 1")
        if not 0 <= self.expert_reinit <= 1:
            raise RouterError.of("expert_reinit", self.expert_reinit, "give a share from 0 to 1")
        if self.top_k == 1 and self.normalize_weights:
            # The only weight would be the constant 1, through which no gradient of the task reaches the router
            remedy = "with top_k=1 the router would learn nothing from the task; leave it None or False"
            raise RouterError.of("normalize_weights", self.normalize_weights, remedy)


@dataclass(frozen=True, kw_only=True)
class GeoMixtureOptions:
    """Options of metadata-routed experts, for `GeoMoeMlp`, `GeoMoeVisionTransformer` and `upcycle_with_metadata`.

    Attributes:
        num_experts: Number of routed experts (E), beside the shared one.
        top_k: Routed experts per image (K), 1 to E.
        router_noise: Standard deviation of the noise on training logits. None means 1 / E.
        expert_drop: Dropout rate inside the routed experts.
        expert_perturbation: Noise that upcycling adds to each routed expert's weights. It is a standard deviation
            relative to that of the matrix. Equal experts have no gradient toward difference (see
            `losses.cka_diversity_loss`). 0 keeps the dense network's output.
        shared_expert: Whether there is a shared expert. Without one, an image without metadata is an error.

    >>> model = timm.create_model("moge_tiny", num_experts=8, top_k=2)
    """

    num_experts: int = 6
    top_k: int = 3
    router_noise: float | None = None
    expert_drop: float = 0.0
    expert_perturbation: float = 0.0
    shared_expert: bool = True
    expert_width: ClassVar[float] = 1.0  # options of `MixtureOptions` alone
    expert_reinit: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if self.expert_perturbation < 0:
            remedy = "give a relative deviation, or 0 for none"
            raise RouterError.of("expert_perturbation", self.expert_perturbation, remedy)


def option_names(*option_classes: type) -> tuple[str, ...]:
    """Names of the options that dataclasses of options declare."""
    return tuple(field.name for options in option_classes for field in fields(options))


def build_options(options_class: type[OptionsT], given: Mapping[str, Any], owner: str) -> OptionsT:
    """Builds a dataclass of options by name, see `check_options`."""
    check_options(given, option_names(options_class), owner)
    return options_class(**given)


def take_options(options_class: type[OptionsT], keywords: dict[str, Any]) -> OptionsT:
    """Builds a dataclass of options from the keywords that belong to it, and removes these."""
    names = option_names(options_class)
    return options_class(**{name: keywords.pop(name) for name in names if name in keywords})


def check_options(given: Mapping[str, Any], names: Collection[str], owner: str) -> None:
    """Refuses options that do not exist and names the nearest. `owner` takes them: a class or a function."""
    for name in given:
        if name not in names:
            hint = did_you_mean(name, names) or f"it takes {', '.join(names)}"
            raise OptionError.of(name, given[name], f"{owner} has no such option; {hint}")
