"""Checkpoints of the GMoE authors' released code (Tutel layout) to this package's names.

There a mixture layer holds, under the block's `mlp`, the stacked matrices `experts.batched_fc1_w` (E, H, D) and
`experts.batched_fc2_w` (E, H, D; the second transposed with respect to a linear layer), biases
`experts.batched_fc1_bias` (E, H) and `experts.batched_fc2_bias` (E, D), sometimes with an axis of length 1 between, and
the router `gates.0`: a linear `wg`, or `cosine_projector`, `sim_matrix` (R, E) and `temperature` (1,), the logarithm of
the scale. Later releases of Tutel add a buffer `_num_global_experts`, which the shapes make redundant.
"""

from collections.abc import Callable

from torch import Tensor


def _keep(value: Tensor) -> Tensor:
    return value


def _transpose(value: Tensor) -> Tensor:
    return value.transpose(-1, -2).contiguous()


def _two_axes(value: Tensor) -> Tensor:
    return value.reshape(value.shape[0], -1)


def _one(value: Tensor) -> Tensor:
    return value.reshape(1)


_RENAMES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "experts.batched_fc1_w": ("experts.fc1.weight", _keep),
    "experts.batched_fc2_w": ("experts.fc2.weight", _transpose),
    "experts.batched_fc1_bias": ("experts.fc1.bias", _two_axes),
    "experts.batched_fc2_bias": ("experts.fc2.bias", _two_axes),
    "gates.0.wg.weight": ("router.gate.weight", _keep),
    "gates.0.cosine_projector.weight": ("router.proj.weight", _keep),
    "gates.0.cosine_projector.bias": ("router.proj.bias", _keep),
    "gates.0.sim_matrix": ("router.codes", _transpose),
    "gates.0.temperature": ("router.logit_scale", _one),
}
_COUNTER = ".mlp._num_global_experts"


def is_tutel_state_dict(state_dict: dict[str, Tensor]) -> bool:
    """Whether a (possibly wrapped) state dict comes from the released code."""
    return any(key.endswith("experts.batched_fc1_w") for key in _unwrap(state_dict))


def convert_tutel_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames and reshapes a checkpoint of the released code.

    Args:
        state_dict: Its state dict, as it is or inside the training script's `model_dict`, with the algorithm's
            `model.` prefix or without.

    Returns:
        The state dict of the corresponding `gmoe_*` or `sfmoe_*` model. Keys that are not of a mixture layer stay.
    """
    converted = {}
    for key, value in _unwrap(state_dict).items():
        key = key.removeprefix("model.")
        if key.endswith(_COUNTER):
            continue
        source = next((old for old in _RENAMES if key.endswith(f".mlp.{old}")), None)
        if source is None:
            converted[key] = value
        else:
            new, reshape = _RENAMES[source]
            converted[key.removesuffix(source) + new] = reshape(value)
    return converted


def _unwrap(state_dict: dict) -> dict[str, Tensor]:
    return state_dict.get("model_dict", state_dict)
