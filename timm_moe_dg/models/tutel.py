"""Converts checkpoints of the GMoE authors' released code, which uses the library Tutel.

Tutel's layout of a mixture layer, under the block's `mlp`:

- `experts.batched_fc1_w` (E, H, D) and `experts.batched_fc2_w` (E, H, D), the second transposed compared with nn.Linear
- `experts.batched_fc1_bias` (E, H) and `experts.batched_fc2_bias` (E, D), in some releases (E, 1, H) and (E, 1, D)
- a linear router `gates.0.wg`, or a cosine router `gates.0` with `cosine_projector`, `sim_matrix` (R, E) and
  `temperature` (1,), the logarithm of the scale
- in later releases `_num_global_experts`, the number of experts

Axes: D features, H hidden features, E experts, R projected features.
"""

from torch import Tensor

_RENAMES = {
    "experts.batched_fc1_w": "experts.fc1.weight",
    "experts.batched_fc2_w": "experts.fc2.weight",
    "experts.batched_fc1_bias": "experts.fc1.bias",
    "experts.batched_fc2_bias": "experts.fc2.bias",
    "gates.0.wg.weight": "router.gate.weight",
    "gates.0.cosine_projector.weight": "router.proj.weight",
    "gates.0.cosine_projector.bias": "router.proj.bias",
    "gates.0.sim_matrix": "router.codes",
    "gates.0.temperature": "router.logit_scale",
}
_TRANSPOSED = ("experts.batched_fc2_w", "gates.0.sim_matrix")


def is_tutel_state_dict(state_dict: dict[str, Tensor]) -> bool:
    """Returns whether a state dict, possibly wrapped, comes from the released code."""
    return any(key.endswith("experts.batched_fc1_w") for key in _unwrap(state_dict))


def convert_tutel_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames and reshapes a checkpoint of the released code to the state dict of a `gmoe_*` or `sfmoe_*` model.

    The checkpoint is bare, or `model_dict` of the training script's file, with or without the algorithm's prefix
    `model.`. Other layers keep their names.
    """
    converted = {}
    for key, value in _unwrap(state_dict).items():
        key = key.removeprefix("model.")
        if key.endswith(".mlp._num_global_experts"):  # the shapes give the number
            continue
        source = next((old for old in _RENAMES if key.endswith(f".mlp.{old}")), "")
        if source in _TRANSPOSED:
            value = value.transpose(-1, -2).contiguous()
        elif source.endswith("_bias"):
            value = value.reshape(value.shape[0], -1)
        elif source == "gates.0.temperature":
            value = value.reshape(1)
        converted[key.removesuffix(source) + _RENAMES.get(source, "")] = value
    return converted


def _unwrap(state_dict: dict) -> dict[str, Tensor]:
    # The training script saves {"args": ..., "model_dict": ...}
    return state_dict.get("model_dict", state_dict)
