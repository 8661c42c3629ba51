"""MoGE on a place folder of five bands: trained, resumed bit for bit, evaluated, asked, and drawn."""

import json

import numpy as np
import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file

from tests.band_files import band_folder, write_tiff
from tests.load_tool import read_rows, run_tool
from timm_moe_dg.data.readers.images import read_pixels
from timm_moe_dg.networks.calibration import load_calibration
from timm_moe_dg.protocols.records import read_records
from timm_moe_dg.protocols.selection import training_domain_validation

pytestmark = pytest.mark.slow  # whole runs

MODEL = ["--model", "moge_tiny", "--img-size", "16", "--model-kwargs", "patch_size=8", "depth=2", "embed_dim=24"]
NAMES = ("B02", "B03", "B04", "B08", "B8A")
SMALL = [*MODEL, "num_heads=3", "moe_layers=(1,)", "-b", "2", "-j", "0", "--eval-freq", "2", "--reprob", "0.2"]
SMALL += ["--save-rules", "oracle"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return band_folder(tmp_path_factory.mktemp("bands") / "data")


def finetune(data, output, name, *words):
    data_words = ["--dataset", "place_folder", "--data-dir", data]
    run_tool("finetune", *data_words, *SMALL, "--output", output, *words, "--experiment", name)
    return output / name


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    return finetune(data, tmp_path_factory.mktemp("runs"), "a", "--in-chans", "5", "--steps", "5", "--eval-train")


def from_rgb(folder):
    """Options that start from the weights of a network of RGB images."""
    rgb = timm.create_model("moge_tiny", img_size=16, patch_size=8, depth=2, embed_dim=24, num_heads=3, moe_layers=(1,))
    torch.save(rgb.state_dict(), folder / "rgb.pth")
    return ["--initial-checkpoint", folder / "rgb.pth", "--steps", "1", "--lr", "0"]


def kernels(run):
    """The kernels of a run, and those of RGB that it started from."""
    weights = load_file(run / "best" / "model.safetensors"), torch.load(run.parent / "rgb.pth", weights_only=True)
    return [state["patch_embed.proj.weight"] for state in weights]


@pytest.fixture(scope="module")
def named_run(data, tmp_path_factory):
    """A run of named bands, from weights of RGB."""
    folder = tmp_path_factory.mktemp("named")
    return finetune(data, folder, "a", "--bands", *NAMES, *from_rgb(folder))


def test_a_run_knows_its_bands_and_each_color_has_its_kernel(named_run):
    names = [f"sentinel2:{name}" for name in NAMES]
    args = yaml.safe_load((named_run / "args.yaml").read_text())
    config = json.loads((named_run / "best" / "config.json").read_text())
    assert (args["bands"], args["in_chans"], config["bands"]) == (names, 5, names)
    weight, rgb = kernels(named_run)
    torch.testing.assert_close(weight[:, :3], rgb.flip(1), rtol=0, atol=0)
    torch.testing.assert_close(weight[:, 3:], rgb.mean(1, keepdim=True).expand(-1, 2, -1, -1))


def test_the_mean_and_deviation_of_the_training_images_stay_with_the_model(run, data):
    config = json.loads((run / "best" / "config.json").read_text())["pretrained_cfg"]
    pixels = np.stack([read_pixels(str(path), 5).numpy() for path in data.glob("*-train-*.tif")]).astype(np.float64)
    assert config["input_size"] == [5, 16, 16]
    np.testing.assert_allclose(config["mean"], pixels.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(config["std"], pixels.std((0, 2, 3)), rtol=1e-6)


def test_a_run_that_goes_on_is_bit_for_bit_the_one_that_never_ended(run, data, tmp_path):
    short = finetune(data, tmp_path, "b", "--in-chans", "5", "--steps", "3")
    run_tool("finetune", "--resume", short, "--steps", 5)
    one, other = (load_file(folder / "best_oracle" / "model.safetensors") for folder in (run, short))
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
    assert (short / "best" / "config.json").read_text() == (run / "best" / "config.json").read_text()


def test_its_network_is_evaluated_on_the_same_images_as_in_training(run, tmp_path):
    run_tool("evaluate", "--model", run, "-j", 0, "--output", tmp_path / "out")
    measured = read_rows(tmp_path / "out" / "per_domain.csv")
    assert [row["role"] for row in measured].count("train") == 2
    record = training_domain_validation(read_records(run / "results.jsonl"))
    assert [float(row["in_accuracy"]) for row in measured] == pytest.approx(record.in_acc)


def test_predictions_are_those_of_the_saved_network(run, data, tmp_path):
    words = ["--model", run, data, "-j", 0, "--metadata", data / "metadata.csv"]
    run_tool("predict", *words, "--output", tmp_path / "p.csv")
    network = timm.create_model(f"local-dir:{run / 'best'}", pretrained=True).eval()
    mean, std = (torch.tensor(network.pretrained_cfg[name]).view(5, 1, 1) for name in ("mean", "std"))
    temperature = load_calibration(f"local-dir:{run / 'best'}").temperature
    rows = {row["path"]: row for row in read_rows(tmp_path / "p.csv")}
    for row in read_rows(data / "metadata.csv")[:3]:
        image = (read_pixels(str(data / row["path"]), 5) - mean) / std
        place = torch.tensor([[float(row["lon"]), float(row["lat"])]])
        with torch.no_grad():
            expected = (network(image[None], place) / temperature).softmax(1).max().item()
        assert float(rows[str(data / row["path"])]["probability"]) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "5 bands: give --in-chans 5"),
        (["--in-chans", "4"], "5 bands, expected 4"),
        (["--bands", "B02", "B03"], "5 bands, expected 2"),
        (["--bands", "B02", "B03", "--in-chans", "5"], "in_chans=5"),
        (["--bands", "B2", "B3"], "bands='B2'"),
        (["--in-chans", "5", "--mean", "1", "2", "3"], r"mean=\[1.0, 2.0, 3.0\]"),
        (["--in-chans", "5", "--aa", "rand-m9-mstd0.5"], "aa='rand-m9-mstd0.5'"),
    ],
)
def test_what_does_not_go_together_is_refused(data, tmp_path, words, message):
    with pytest.raises(SystemExit, match=message):
        finetune(data, tmp_path, "c", *words, "--dry-run")


def test_one_file_of_other_bands_among_the_training_images_is_found_before_training(tmp_path):
    data = band_folder(tmp_path / "data")
    write_tiff(data / "Africa-train-3.tif", np.zeros((4, 16, 16), np.uint16))
    with pytest.raises(SystemExit, match=r"Africa-train-3.tif': has 4 bands, expected 5"):
        finetune(data, tmp_path / "runs", "a", "--in-chans", "5", "--dry-run")


@pytest.mark.parametrize("words", [["--in-chans", "3"], []])
def test_a_network_of_five_bands_is_not_evaluated_on_others(run, words):
    with pytest.raises(SystemExit, match="in_chans=5"):
        run_tool("evaluate", "--model", run, "--dataset", "rotated_digits", *words, "-j", 0)


def test_weights_of_three_bands_start_a_network_of_five_as_timm_adapts_them(data, tmp_path):
    weight, rgb = kernels(finetune(data, tmp_path, "d", "--in-chans", "5", *from_rgb(tmp_path)))
    torch.testing.assert_close(weight, rgb.repeat(1, 2, 1, 1)[:, :5] * 3 / 5)  # timm.models.adapt_input_conv


@pytest.mark.parametrize("named", [False, True])
def test_the_card_s_snippet_reads_all_bands(run, named_run, data, tmp_path, capsys, named):
    run = named_run if named else run
    run_tool("push_to_hub", run, "--repo-id", "someone/bands", "--dry-run", "--output", tmp_path)
    card = (tmp_path / "hub" / "someone--bands" / "README.md").read_text()
    names = f" ({', '.join(f'sentinel2:{name}' for name in NAMES)})" if named else ""
    assert f"| 5 bands{names} of 16 x 16 pixels" in card
    snippet = (
        card.partition("```python\n")[2].partition("```")[0].replace("hf-hub:someone/bands", f"local-dir:{run}/best")
    )
    capsys.readouterr()
    exec(snippet.replace("image.tif", str(data / "Asia-ood_test-0.tif")), {})
    assert capsys.readouterr().out.strip() in ("field", "forest")
