"""The task loss in closed form, and sizes and colors that the network is built for."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from tests.finetuning.plans import image_folder, plan_of
from tests.models.cases import randomize
from tests.saved_run import SMALL as SAVED
from tests.saved_run import saved_run
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.model import (
    build_model,
    build_task_loss,
    prepare_network,
    set_expert_mode,
)
from timm_moe_dg.finetuning.processes import process_state_kept
from timm_moe_dg.finetuning.training_data import cover_training_coordinates
from timm_moe_dg.layers import LinearRouter
from timm_moe_dg.networks.build import build_network, data_config, save_network, saved_config
from timm_moe_dg.networks.trained import load_trained
from timm_moe_dg.protocols.options import RunOptions

SIZE = {"embed_dim": 24, "depth": 1, "num_heads": 2}


def test_smoothing_in_closed_form_and_the_plain_loss_without(tmp_path):
    logits, targets = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0])
    norm = math.log(math.exp(2) + 2)
    plain = build_task_loss(plan_of(tmp_path), torch.device("cpu"))
    assert torch.equal(plain(logits, targets), torch.nn.functional.cross_entropy(logits, targets))
    smooth = build_task_loss(plan_of(tmp_path, "--label-smoothing", "0.3"), torch.device("cpu"))
    assert smooth(logits, targets).item() == pytest.approx(0.8 * (norm - 2) + 0.2 * norm)


@pytest.mark.parametrize(
    ("model", "option"),
    [("deit_tiny_patch16_224", "z-coef"), ("deit_tiny_patch16_224", "domain-coef"), ("moge_tiny", "image-coef")],
)
def test_weights_of_losses_that_a_model_does_not_have_are_refused(model, option, tmp_path):
    size = [f"{name}={value}" for name, value in SIZE.items()]
    words = ["--dataset", "geo_digits", "--model", model, "--model-kwargs", *size, f"--{option}", "0.1"]
    with pytest.raises(ArgumentError, match=f"^{option.replace('-', '_')}="):
        prepare_network(plan_of(tmp_path, *words))


def test_an_optimizer_of_parts_of_stacks_trains_the_network_of_several_processes(tmp_path, monkeypatch):
    size = [f"{name}={value}" for name, value in {**SIZE, "moe_layers": (0,)}.items()]
    plan = plan_of(tmp_path, "--opt", "lamb", "--model", "gmoe_tiny_patch16", "--model-kwargs", *size)
    with process_state_kept(tmp_path):
        accelerator = Accelerator(cpu=True)
        # As accelerate calls it there
        monkeypatch.setattr(type(accelerator), "device", torch.device("cpu:0"))
        model = build_model(plan, accelerator)
        for parameter in model.network.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = model.network.blocks[0].mlp.fc1.weight.detach().clone()
        model.training.optimizer.step()
    assert not torch.equal(model.network.blocks[0].mlp.fc1.weight, before)


def test_two_compiled_runs_of_one_process_have_programs_of_their_own(tmp_path, monkeypatch):
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda network: compiled(network, backend="eager"))  # quick
    size = [f"{name}={value}" for name, value in SIZE.items()]
    model = ["--model", "deit_tiny_patch16_224", "--img-size", "16", "--compile", "--model-kwargs", *size]
    for method in ("ERM", "SD", "MIRO"):  # the last one reads features by hooks
        with process_state_kept(tmp_path):
            plan = plan_of(tmp_path, "--algorithm", method, *model)
            training = build_model(plan, Accelerator(cpu=True))
            minibatches = [(torch.randn(2, 3, 16, 16), torch.tensor([0, 1]))] * len(plan.training)
            losses = training.algorithm.take_step(training.training, minibatches)
            assert losses["loss"].isfinite()


class Experts(nn.Module):
    mode = None

    def set_expert_mode(self, mode):
        self.mode = mode


def test_the_expert_mode_is_the_one_that_is_asked_for():
    for mode in ("routed", "shared"):
        network = Experts()
        set_expert_mode(network, RunOptions(expert_mode=mode))
        assert network.mode == mode
    with pytest.raises(ArgumentError, match="expert_mode='shared': toy has no metadata-routed experts"):
        set_expert_mode(nn.Linear(1, 1), RunOptions(model="toy", expert_mode="shared"))
    set_expert_mode(nn.Linear(1, 1), RunOptions())


SMALL = ["--model-kwargs", "embed_dim=24", "depth=2", "num_heads=2", "patch_size=8"]
MOGE = ["--model", "moge_tiny", *SMALL, "moe_layers=(1,)"]


def test_a_network_that_reads_places_is_refused_on_data_without_any(tmp_path):
    erm_le = ["--model", "erm_le_tiny_patch16", *SMALL]
    for words, remedy in (
        (MOGE, "--dataset place_folder, or --expert-mode shared"),
        (erm_le, "--dataset place_folder$"),
        ([*erm_le, "metadata_encoder=location_id"], r"--dataset iWildCam$"),
    ):
        with pytest.raises(ArgumentError, match=f"^model=.*{remedy}"):
            prepare_network(plan_of(tmp_path, *words))
    assert prepare_network(plan_of(tmp_path, *MOGE, "--expert-mode", "shared")).expert_mode == "shared"
    plan = plan_of(tmp_path, *MOGE, "metadata_drop=0.0", "--dataset", "geo_digits")
    assert prepare_network(plan).expert_mode == "routed"
    unknown = [replace(domain, metadata=np.full_like(domain.metadata, np.nan)) for domain in plan.domains]
    with pytest.raises(ArgumentError, match="model="):
        prepare_network(replace(plan, domains=unknown))


GMOE = ["--model", "gmoe_tiny_patch16", *SMALL, "moe_layers=(1,)"]


@pytest.mark.parametrize("words", [["router=linear"], ["--router", "linear"], ["router=linear", "--router", "linear"]])
def test_the_router_is_the_one_that_is_asked_for(words, tmp_path):
    plan = plan_of(tmp_path, *GMOE, *words)
    assert isinstance(prepare_network(plan).blocks[1].mlp.router, LinearRouter)
    assert plan.folder.args["router"] == ("linear" if "--router" in words else None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "deit_tiny_patch16_224", *SMALL], "router='linear': deit_tiny_patch16_224 has no token-routed"),
        (["--model", "hrnet_w18_small"], "router='linear': hrnet_w18_small has no token-routed"),
        ([*MOGE, "--dataset", "geo_digits"], "router='linear': moge_tiny has no token-routed"),
        ([*GMOE, "router=self"], "router='linear': --model-kwargs has router='self'; "),
        ([*GMOE, "--router", "linaer"], r"router='linaer': did you mean linear\?$"),
        ([*GMOE, "--router", "own"], "router='own': choose from cosine, linear, .* --import"),
    ],
)
def test_routers_that_a_model_cannot_have_are_refused(words, message, tmp_path):
    with pytest.raises(ArgumentError, match=f"^{message}[^\n]*$"):
        prepare_network(plan_of(tmp_path, "--router", "linear", *words))


@pytest.mark.parametrize(("mode", "tokens"), [("routed", 256), ("shared", 0)])
def test_routed_experts_have_a_diversity_loss_where_they_compute(mode, tokens, tmp_path):
    network = prepare_network(plan_of(tmp_path, *MOGE, "--dataset", "geo_digits", "--expert-mode", mode))
    assert network.blocks[-1].mlp.forced_tokens == tokens


def test_routers_that_learn_from_random_weights_are_warned_of(tmp_path, caplog):
    data = ["--dataset", "geo_digits"]
    for words in (
        [*MOGE, "metadata_drop=0.0"],
        [*MOGE, "metadata_encoder=sincos"],
        [*MOGE, "--expert-mode", "shared"],
        GMOE,
    ):
        prepare_network(plan_of(tmp_path, *words, *data))
    assert "metadata_drop" not in caplog.text
    prepare_network(plan_of(tmp_path, *MOGE, *data))
    assert "moge_tiny starts from random weights with metadata_drop=0.5" in caplog.text
    assert "add --model-kwargs metadata_drop=0.0, or --pretrained" in caplog.text


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_run_goes_on_with_more_classes(tmp_path, pretrained):
    saved = saved_run(tmp_path / "run", "gmoe_tiny_patch16", ("dog", "cat"))
    files = (f"site/{label}/{number}.png" for label in ("ant", "cat", "dog") for number in range(5))
    data = [*image_folder(tmp_path / "data", *files), "--test-domains", "none", "--img-size", "32"]
    kwargs = ["--model-kwargs", *(f"{key}={value}" for key, value in SAVED.items())]
    words = ["--model", "gmoe_tiny_patch16", *kwargs, "--initial-checkpoint", str(tmp_path / "run")]
    words = ["--model", f"local-dir:{tmp_path / 'run' / 'best'}", "--pretrained"] if pretrained else words
    network = prepare_network(plan_of(tmp_path, *data, *words))
    assert torch.equal(network.head.weight[[1, 2]], saved.head.weight[[1, 0]])  # cat, dog
    assert not torch.isin(network.head.weight[0], saved.head.weight).any()
    assert torch.equal(network.patch_embed.proj.weight, saved.patch_embed.proj.weight)


TRAINED = [f"train {name}" for name in ("Africa", "Asia", "Europe", "North America", "South America")]  # of geo_digits
D3G_SIZE = {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}


@pytest.mark.parametrize("source", ["folder", "file"])
@pytest.mark.parametrize(
    "before",
    [
        TRAINED,
        [*TRAINED[1:], TRAINED[0]],  # another order
        [TRAINED[3], "elsewhere", *TRAINED[:3]],  # one of them is another domain
        ["here", TRAINED[4]],  # another number of domains
        ["here", *TRAINED[::-1], "there"],
        ["here", "there"],
    ],
)
def test_heads_and_relations_of_d3g_are_kept_by_the_names_of_their_domains(source, before, tmp_path, caplog):
    caplog.set_level("INFO")
    kwargs = {**D3G_SIZE, "num_domains": len(before)}
    old = randomize(build_network("d3g_tiny_patch16", 10, img_size=16, model_kwargs=kwargs)).eval()
    old.set_domains([torch.tensor([[30.0 * n, 10.0]]) for n in range(len(before))], before)
    plan = plan_of(tmp_path, "--dataset", "geo_digits")
    save_network(old, tmp_path / "run" / "best", plan.classes, data_config(old, 16))
    size = [f"{name}={value}" for name, value in D3G_SIZE.items()]
    words = ["--model", "d3g_tiny_patch16", "--initial-checkpoint", str(tmp_path / "run"), "--model-kwargs", *size]
    words = words if source == "file" else ["--model", f"local-dir:{tmp_path / 'run' / 'best'}", "--pretrained"]
    plan = plan_of(tmp_path, *words, "--dataset", "geo_digits", "--img-size", "16")
    assert [plan.names[position] for position in plan.training] == TRAINED
    network = prepare_network(plan)
    assert sum("heads of domains" in message for message in caplog.messages) == 1
    kept = {new: before.index(name) for new, name in enumerate(TRAINED) if name in before}
    for name in ("weight", "bias"):
        values, expected = getattr(network.head, name), getattr(old.head, name)
        assert values.shape[:2] == (10, 5)
        assert torch.equal(values[:, list(kept)], expected[:, list(kept.values())])
        fresh = values[:, [column for column in range(5) if column not in kept]]
        assert not torch.isin(fresh, expected).any()
    cover_training_coordinates(network, plan)
    network.eval()
    places = [torch.from_numpy(rows[:1]).float() for rows in plan.training_rows("metadata")]
    with torch.no_grad():
        relations = [network.metadata_encoder.encoder(place)[0, :5] for place in places]
        old_relations = [old.metadata_encoder.encoder(torch.tensor([[30.0 * n, 10.0]]))[0] for n in range(len(before))]
        for new, position in kept.items():
            torch.testing.assert_close(
                relations[new][list(kept)], old_relations[position][list(kept.values())], rtol=0, atol=1e-6
            )
        save_network(network, tmp_path / "again", plan.classes, data_config(network, 16))
        again = load_trained(f"local-dir:{tmp_path / 'again'}")
        images = torch.randn(5, 3, 16, 16)
        assert torch.equal(again(images, torch.cat(places)), network(images, torch.cat(places)))
    assert saved_config(f"local-dir:{tmp_path / 'again'}")["model_args"]["domain_names"] == TRAINED


def test_heads_of_d3g_without_names_are_kept_by_number_or_refused(tmp_path, caplog):
    for number in (5, 3):
        kwargs = {**D3G_SIZE, "num_domains": number}
        old = build_network("d3g_tiny_patch16", 10, img_size=16, model_kwargs=kwargs)
        plan = plan_of(tmp_path, "--dataset", "geo_digits")
        save_network(old, tmp_path / "best", plan.classes, data_config(old, 16))
        words = ["--model", f"local-dir:{tmp_path / 'best'}", "--pretrained", "--img-size", "16"]
        plan = plan_of(tmp_path, *words, "--dataset", "geo_digits")
        network = prepare_network(plan)
        assert "heads are carried by their number" in caplog.text
        assert torch.equal(network.head.weight, old.head.weight)
        if number == 5:
            cover_training_coordinates(network, plan)
        else:
            with pytest.raises(ArgumentError, match=r"^num_domains=3"):
                cover_training_coordinates(network, plan)
