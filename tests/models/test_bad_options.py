"""Options that no model can have: a named error with the option, its value and what to do."""

import pytest
import timm
import torch

from tests.models.cases import BY_NAME, mixture_layers
from timm_moe_dg.errors import MetadataError, MoeLayersError, OptionError, RouterError
from timm_moe_dg.models.gmoe import resolve_moe_layers


@pytest.mark.parametrize(
    ("moe_layers", "message"),
    [
        ([4], r"moe_layers=\[4\].*from 0 to 3"),
        ([-1], r"moe_layers=\[-1\].*from 0 to 3"),
        ([], r"moe_layers=\[\].*at least one block"),
        ([True], r"moe_layers=\[True\].*from 0 to 3"),
        ([1.0], r"moe_layers=\[1\.0\].*from 0 to 3"),
        (["0"], r"moe_layers=\['0'\].*from 0 to 3"),
        (2, r"moe_layers=2: .*tuple of indices"),
        ({"first": 0}, r"moe_layers=\{'first': 0\}: .*tuple of indices"),
        ("first_two", r"moe_layers='first_two': choose one of \['every_two', 'last_two'\]"),
        ("FFFFFFFFSFSF", r"moe_layers='FFFFFFFFSFSF'.*each of 4 blocks"),
        ("FFFF", r"moe_layers='FFFF'.*at least one block"),
        ("ssff", r"moe_layers='ssff'.*S or F"),
    ],
)
def test_moe_layers(moe_layers, message):
    with pytest.raises(MoeLayersError, match=message):
        resolve_moe_layers(moe_layers, 4)


@pytest.mark.parametrize("moe_layers", ["every_two", "last_two"])
def test_a_network_whose_even_blocks_cannot_become_mixtures(moe_layers):
    with pytest.raises(
        MoeLayersError, match=rf"moe_layers='{moe_layers}': no even-numbered block can .*; give block ind"
    ):
        resolve_moe_layers(moe_layers, 4, able=[1, 3])


def test_models_refuse_blocks_that_they_do_not_have(case):
    with pytest.raises(MoeLayersError, match=r"moe_layers=\[4\].*from 0 to 3"):
        case.small(moe_layers=[4], device="meta")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 7}, r"top_k=7: choose 1 to num_experts=6"),
        ({"top_k": 0}, r"top_k=0: choose 1 to num_experts=6"),
        ({"num_experts": 2, "top_k": 3}, r"top_k=3: choose 1 to num_experts=2"),
        ({"num_experts": 0}, r"num_experts=0: .*at least one expert"),
        ({"router_noise": -1.0}, r"router_noise=-1\.0: .*0 or more"),
    ],
)
def test_routing_of_every_model(case, options, message):
    with pytest.raises(RouterError, match=message):
        case.small(device="meta", **options)


@pytest.mark.parametrize("options", [{"router": "linear"}, {"capacity_factor": 1.0}])
def test_moge_has_no_token_routing_options(options):
    with pytest.raises(OptionError, match=f"{next(iter(options))}=.*GeoMoeVisionTransformer has no such option"):
        BY_NAME["moge_tiny"].small(device="meta", **options)


@pytest.mark.parametrize(
    ("moe_layers", "expected"),
    [
        ("last_two", (8, 10)),
        ("every_two", (0, 2, 4, 6, 8, 10)),
        ("FFFFFFFFSFSF", (8, 10)),
        ("SFSFSFSFSFSF", (0, 2, 4, 6, 8, 10)),
        ([5, 11], (5, 11)),
        ((11, 5, 5), (5, 11)),
        (range(3), (0, 1, 2)),
    ],
)
def test_forms_of_moe_layers(moe_layers, expected):
    assert resolve_moe_layers(moe_layers, 12) == expected


def test_every_form_builds_the_same_blocks():
    for moe_layers in ("every_two", "SFSF", [0, 2], (2, 0)):
        model = BY_NAME["moge_tiny"].small(moe_layers=moe_layers, device="meta")
        assert list(mixture_layers(model)) == ["blocks.0.mlp", "blocks.2.mlp"]


def test_an_option_with_a_letter_missing_on_a_backbone_names_the_nearest():
    with pytest.raises(OptionError, match=r"num_expert'\); did you mean num_experts\?"):
        timm.create_model("gmoe", backbone="deit_tiny_patch16_224", num_expert=4)


def test_coordinates_in_a_list_are_refused():
    model = BY_NAME["moge_tiny"].small()
    with pytest.raises(MetadataError, match=r"metadata='list': give a tensor"):
        model(torch.randn(1, 3, 32, 32), [[13.4, 52.5]])
