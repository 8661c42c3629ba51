"""How timm's optimizer helpers see the parameters: weight decay, layer-wise learning rates."""

import pytest
import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay

from tests.models.cases import BY_NAME, Case, mixture_layers

DECAY = 0.05


def settings(case: Case, make_groups, key: str, **kwargs) -> dict[str, float]:
    """Parameter name -> what its group says under `key`."""
    model = case.small(init_values=0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = make_groups(model, weight_decay=DECAY, no_weight_decay_list=model.no_weight_decay(), **kwargs)
    found = {names[id(parameter)]: group[key] for group in groups for parameter in group["params"]}
    assert found.keys() == set(names.values())
    return found


@pytest.mark.parametrize("make_groups", [param_groups_weight_decay, param_groups_layer_decay])
def test_expert_biases_codes_and_scales_are_not_decayed_and_expert_matrices_are(case, make_groups):
    decay = settings(case, make_groups, "weight_decay")
    matrices = {name for name in decay if ".mlp." in name and name.endswith(("fc1.weight", "fc2.weight"))}
    routers = {name for name in decay if name.endswith(("gate.weight", "router.proj.weight"))}
    undecayed = {name for name in decay if name.endswith((".bias", "codes", "logit_scale", "gamma", "norm1.weight"))}
    assert any(".experts." in name for name in matrices)
    assert any(".experts.fc1.bias" in name for name in undecayed)
    assert {decay[name] for name in matrices | routers} == {DECAY}
    assert {decay[name] for name in undecayed} == {0.0}
    assert {decay[name] for name in ("pos_embed", "cls_token")} == {0.0}


def test_no_weight_decay_names_existing_parameters_exactly(case):
    model = case.small()
    ours = {name for name in model.no_weight_decay() if "blocks" in name}
    assert ours <= set(dict(model.named_parameters()))
    biases = {name for name, _ in model.named_parameters() if ".experts." in name and name.endswith(".bias")}
    assert len(biases) == 4
    assert biases <= ours


def test_experts_and_routers_learn_at_the_rate_of_their_block(case):
    scales = settings(case, param_groups_layer_decay, "lr_scale", layer_decay=0.5)
    blocks = [{scale for name, scale in scales.items() if name.startswith(f"blocks.{index}.")} for index in range(4)]
    # one level for the stem, one per block, one for the final norm and the head
    assert blocks == [{0.5**4}, {0.5**3}, {0.5**2}, {0.5**1}]
    assert {scales["pos_embed"], scales["cls_token"]} == {0.5**5}
    assert scales["head.weight"] == 1.0


def test_a_metadata_encoder_learns_at_the_full_rate(moge):
    scales = settings(moge, param_groups_layer_decay, "lr_scale", layer_decay=0.5)
    assert {scale for name, scale in scales.items() if name.startswith("metadata_encoder.")} == {1.0}


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "lion", "adafactor", "sgd", "adan"])
def test_an_optimizer_of_timms_moves_every_parameter(optimizer):
    case = BY_NAME["moge_tiny"]
    model = case.small()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    steps = create_optimizer_v2(model, opt=optimizer, lr=0.1, weight_decay=DECAY, layer_decay=0.9)
    torch.nn.functional.cross_entropy(model(*case.inputs(8)), torch.arange(8)).backward()
    steps.step()
    still = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    assert not still


def test_mixture_layers_of_a_wrapped_model_keep_their_names():
    model = torch.nn.Sequential(BY_NAME["gmoe_tiny_patch16"].small())
    assert list(mixture_layers(model)) == ["0.blocks.0.mlp", "0.blocks.2.mlp"]
