"""Options, metadata and files that no layer can take: the error names the argument and its value."""

import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import ConvMlp, GatedMlp, GlobalResponseNormMlp, LayerNorm2d, Mlp
from timm.models.vitamin import GeGluMlp
from torch import nn

from tests.layers.encoders.satclip_checkpoint import released
from timm_moe_dg.errors import ArgumentError, CheckpointError, MetadataError, OptionError, RouterError
from timm_moe_dg.layers import GeoMoeMlp, LinearRouter, MoeMlp, register_router
from timm_moe_dg.layers.encoders.coverage import thin_coordinates
from timm_moe_dg.layers.encoders.location import LocationEncoder, LocationIdEmbedding, SinCosEncoder
from timm_moe_dg.layers.encoders.metadata import ColumnsEncoder, MetadataEncoder, NumberEncoder
from timm_moe_dg.layers.encoders.pretrained import load_satclip
from timm_moe_dg.layers.reports import supcon_invariance_loss
from timm_moe_dg.models.d3g import DomainRelations

NAN = math.nan


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"router": "best"}, "router='best'"),
        ({"top_k": 7}, "top_k=7"),
        ({"top_k": True + 0.5}, "top_k=1.5"),
        ({"top_k": 1, "normalize_weights": True}, "normalize_weights=True"),
        ({"num_experts": 0}, "top_k=2"),
        ({"router_noise": -1.0}, "router_noise=-1.0"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0"),
        ({"capacity_factor": 1.5, "router_kwargs": {"choice": "threshold"}}, "capacity_factor=1.5"),
        ({"expert_width": 0.0}, "expert_width=0.0"),
        ({"expert_width": 1.5}, "expert_width=1.5"),
        ({"expert_reinit": 1.5}, "expert_reinit=1.5"),
        ({"out_features": 9}, "out_features=9"),
        (
            {"router": "self", "router_kwargs": {"choise": "expert"}},
            "router_kwargs={'choise': 'expert'}: router='self'",
        ),
        ({"router": "self", "num_experts": 9}, "num_experts=9: router='self' takes in_features=8"),
        ({"router_kwargs": {"scores": "tanh"}}, "scores='tanh'"),
        ({"router_kwargs": {"choice": "image"}}, "choice='image'"),
        ({"router_kwargs": {"bias_speed": -0.1}}, "bias_speed=-0.1"),
        ({"router_kwargs": {"bias_speed": 0.1, "choice": "expert"}}, "bias_speed=0.1: choice='expert'"),
        ({"router_kwargs": {"threshold_decay": 1.0}}, "threshold_decay=1.0"),
    ],
)
def test_options_of_mixtures(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(RouterError, match=f"^{re.escape(argument)}"):
        MoeMlp(8, 16, **options)


class Twice(Mlp):
    """A subclass may compute anything."""


def with_first(layer: nn.Module, use_conv: bool = False) -> nn.Module:
    mlp = Mlp(8, 16, use_conv=use_conv)
    mlp.fc1 = layer
    return mlp


@pytest.mark.parametrize(
    ("dense", "argument"),
    [
        (GlobalResponseNormMlp(8, 16), "mlp='GlobalResponseNormMlp'"),
        (GatedMlp(8, 16), "mlp='GatedMlp'"),
        (Twice(8, 16), "mlp='Twice'"),
        (ConvMlp(8, 16, norm_layer=nn.BatchNorm2d), "mlp.norm='BatchNorm2d'"),
        (ConvMlp(8, 16, norm_layer=LayerNorm2d), "mlp.norm='LayerNorm2d'"),
        (Mlp(8, 16, norm_layer=nn.BatchNorm1d), "mlp.norm='BatchNorm1d'"),
        (with_first(nn.Conv2d(8, 16, 3, padding=1), use_conv=True), "mlp.fc1='Conv2d'"),
        (with_first(nn.Bilinear(8, 8, 16)), "mlp.fc1='Bilinear'"),
        (Mlp(8, 16, 9), "mlp.fc2.out_features=9"),
        (Mlp(8, 16, act_layer=lambda: nn.PReLU(16)), "mlp.act.num_parameters=16"),
    ],
)
def test_dense_layers_that_experts_cannot_copy(dense: nn.Module, argument: str) -> None:
    with pytest.raises(RouterError, match=f"^{re.escape(argument)}"):
        MoeMlp.from_dense(dense)


COLUMNS = {"month": (6.5, 3.0), "elevation": (500.0, 250.0)}
ALONE = GeoMoeMlp(8, 16, context_features=4, shared_expert=False)


@pytest.mark.parametrize(
    ("make", "error", "argument"),
    [
        (lambda: MoeMlp(8, 16, topk=1), OptionError, "topk=1: MoeMlp .*did you mean top_k"),
        (lambda: GeoMoeMlp(8, 16, capacity_factor=1.0), OptionError, "capacity_factor=1.0: GeoMoeMlp .*it takes num_"),
        (lambda: GeoMoeMlp(8, 16, expert_perturbation=-1.0), RouterError, "expert_perturbation=-1.0"),
        (lambda: GeoMoeMlp.from_dense(GeGluMlp(8, 16)), RouterError, "mlp='GeGluMlp'"),
        (lambda: GeoMoeMlp.from_dense(Mlp(8, 16, use_conv=True)), RouterError, "mlp='Mlp'"),
        (
            lambda: MoeMlp.from_dense(Mlp(8, 16, norm_layer=nn.LayerNorm), expert_width=0.5),
            RouterError,
            "expert_width=0.5",
        ),
        *(
            (lambda mode=mode: GeoMoeMlp(8, 16).set_expert_mode(mode), RouterError, f"expert mode={mode!r}")
            for mode in ("all", 6, -1, True, None)
        ),
        (lambda: ALONE.set_expert_mode("shared"), RouterError, "expert mode='shared'"),
        (
            lambda: ALONE(torch.zeros(3, 5, 8), torch.zeros(3, 4), torch.tensor([True, False, False])),
            MetadataError,
            r"metadata of samples=\[1, 2\]",
        ),
        (
            lambda: register_router("linear")(type("Other", (LinearRouter,), {})),
            RouterError,
            "router='linear': .*LinearRouter has this name",
        ),
        (lambda: register_router("other")(nn.Linear), RouterError, "router='other'"),
        (lambda: LocationIdEmbedding(0), MetadataError, "num_locations=0"),
        (lambda: MetadataEncoder(nn.ReLU()), MetadataError, "metadata_features=None"),
        (
            lambda: ColumnsEncoder(LocationIdEmbedding(4), COLUMNS),
            MetadataError,
            r"metadata_columns=\['month', 'elevation'\]",
        ),
        (lambda: ColumnsEncoder(SinCosEncoder(8), {"a\nb": (0.0, 1.0)}), MetadataError, r"metadata_columns=\['a\\nb'"),
        (lambda: NumberEncoder(1.0, 0.0), MetadataError, "std=0.0"),
        (lambda: thin_coordinates(torch.full((3, 2), NAN)), MetadataError, r"coordinates=\(3, 2\)"),
        (lambda: DomainRelations(3, query="place"), MetadataError, "relation_query='place'"),
        (lambda: DomainRelations(3, beta=1.5), MetadataError, "relation_beta=1.5"),
        (
            lambda: supcon_invariance_loss(torch.ones(3, 4), torch.zeros(3), torch.zeros(3), 0.0),
            ArgumentError,
            "temperature=0.0",
        ),
    ],
)
def test_what_layers_and_encoders_cannot_do_is_named(make: Any, error: type[ArgumentError], argument: str) -> None:
    with pytest.raises(error, match=f"^{argument}"):
        make()


LOCATION, IDS, FURTHER = LocationEncoder(4), LocationIdEmbedding(5, 4), ColumnsEncoder(SinCosEncoder(4), COLUMNS)


@pytest.mark.parametrize(
    ("encoder", "metadata", "argument"),
    [
        (LOCATION, torch.tensor([[48.1, 111.5]]), r"latitude=111\.5: .*swapped"),
        (LOCATION, torch.tensor([[120.0, 95.0]]), r"latitude=95\.0(?!.*swapped)"),
        (LOCATION, torch.tensor([[NAN, 95.0]]), r"latitude=95\.0"),
        (LOCATION, torch.tensor([[200.0, 10.0]]), r"longitude=200\.0: .*subtract 360"),
        (LOCATION, torch.tensor([[1000.0, 10.0]]), r"longitude=1000\.0(?!.*subtract)"),
        (LOCATION, torch.tensor([[math.inf, 10.0]]), "longitude="),
        (LOCATION, torch.tensor([[1, 2]]), "metadata dtype=torch.int64"),
        (LOCATION, torch.zeros(1), r"metadata shape=\(1,\)"),
        (LOCATION, torch.zeros(1, 3), r"metadata shape=\(1, 3\)"),
        (LOCATION, torch.zeros(2, 2), r"metadata shape=\(2, 2\)"),
        (LOCATION, torch.tensor(1.0), r"metadata shape=\(\)"),
        (LOCATION, [[13.4, 52.5]], "metadata='list'"),
        (LOCATION, torch.zeros(1, 2).half(), r"metadata dtype=torch.float16: .*cast_forward_inputs=False"),
        (FURTHER, torch.zeros(1, 4).bfloat16(), r"metadata dtype=torch.bfloat16: .*cast_forward_inputs=False"),
        (FURTHER, torch.tensor([[10.0, 95.0, 1.0, 1.0]]), r"latitude=95\.0"),
        (FURTHER, torch.zeros(1, 2), r"metadata shape=\(1, 2\): .*month, elevation"),
        (FURTHER, torch.zeros(1), r"metadata shape=\(1,\)"),
        (IDS, torch.tensor([5]), "location id=5"),
        (IDS, torch.tensor([0.0]), "metadata dtype=torch.float32"),
        (IDS, torch.tensor([True]), "metadata dtype=torch.bool"),
        (IDS, torch.tensor([[1]]), r"metadata shape=\(1, 1\)"),
        (DomainRelations(3), torch.tensor([[10.0, 50.0, 3.0]]), r"domain=3\.0"),
    ],
)
def test_metadata(encoder: nn.Module, metadata: Any, argument: str) -> None:
    with pytest.raises(MetadataError, match=f"^{argument}"):
        MetadataEncoder(encoder)(torch.zeros(1, 1), metadata)


def test_rounded_coordinates_are_refused_in_compiled_programs_too() -> None:
    with pytest.raises(MetadataError, match=r"^metadata dtype=torch\.bfloat16"):
        torch.compile(MetadataEncoder(LOCATION), backend="eager")(torch.zeros(1, 1), torch.zeros(1, 2).bfloat16())


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_files_that_are_no_satclip_checkpoint_of_a_known_kind(tmp_path: Path) -> None:
    incomplete, sprung, path = released(), tmp_path / "sprung", tmp_path / "other.ckpt"
    del incomplete["state_dict"]["model.location.nnet.layers.1.bias"]
    numbers = {**released(), "state_dict": dict.fromkeys(incomplete["state_dict"], 5)}
    trap = {"state_dict": {}, "hyper_parameters": Trap(sprung)}
    changes = {"legendre_polys": 5, "embed_dim": 256, "num_hidden_layers": 3, "le_type": "grid"}
    others = [released(**{name: value}) for name, value in changes.items()]
    contents = [*others, incomplete, numbers, {"state_dict": [1], "hyper_parameters": 5}, [1], trap]
    texts = [b"", b"<html>", b"PK\x03\x04" + bytes(100), pickle.dumps(trap)]
    writers = [lambda content=content: torch.save(content, path) for content in contents]
    for write in (*writers, *(lambda text=text: path.write_bytes(text) for text in texts)):
        write()
        with pytest.raises(CheckpointError, match=r"^source='.*other\.ckpt'"):
            load_satclip(path)
    assert not sprung.exists()
    for name in ("none.ckpt", "none"):
        with pytest.raises(CheckpointError, match=f"^source='{name}'"):
            load_satclip(name)
