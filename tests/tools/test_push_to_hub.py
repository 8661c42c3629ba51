"""The publishing tool: folders, printed lines and refused arguments."""

import re
import runpy
import shutil

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.hub.published import CLASSES, config_of, fine_tuned, write_run
from tests.hub_server import fill_cache
from tests.layers.encoders.satclip_checkpoint import released
from tests.load_tool import run_tool
from tests.models.cases import SMALL
from timm_moe_dg.networks.calibration import Calibration, Scores, find_calibration, identify
from timm_moe_dg.networks.trained import load_trained
from timm_moe_dg.storage.run_folder import save_calibration

REPOSITORY = "someone/network"
SIZE = ["--img-size", "32", "--model-kwargs", "depth=4", "embed_dim=32", "num_heads=2"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def dry_run(tmp_path, *words):
    run_tool("push_to_hub", *words, "--repo-id", REPOSITORY, "--output", tmp_path, "--dry-run")
    return tmp_path / "hub" / "someone--network"


def test_a_dry_run_writes_the_folder_and_says_what_would_go_where(tmp_path, capsys):
    folder = dry_run(tmp_path, write_run(tmp_path / "run"), "--private", "--revision", "try")
    out = capsys.readouterr().out
    assert f"{folder} -> https://huggingface.co/{REPOSITORY}, branch try, private, if it is new" in out
    listed = dict(re.findall(r"^ +([\d,]+)  (\S+)$", out, re.MULTILINE))
    assert {name: int(size.replace(",", "")) for size, name in listed.items()} == {
        path.name: path.stat().st_size for path in folder.iterdir()
    }
    assert out.endswith("dry run: nothing was sent\n")
    again = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert again.num_classes == len(CLASSES)


def test_the_report_which_shows_images_is_sent_only_when_asked_for(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "report.html").write_text("<img>")
    assert not (dry_run(tmp_path, run) / "report.html").exists()
    assert (dry_run(tmp_path, run, "--with-report") / "report.html").read_text() == "<img>"


def test_a_space_runs_the_page_of_the_published_model(tmp_path, capsys):
    folder = dry_run(tmp_path, write_run(tmp_path / "run"), "--with-space")
    space = folder.with_name("someone--network--space")
    assert f"{space} -> https://huggingface.co/spaces/{REPOSITORY}" in capsys.readouterr().out
    header = yaml.safe_load((space / "README.md").read_text().split("---")[1])
    assert (header["title"], header["app_file"], header["models"]) == ("network", "app.py", [REPOSITORY])
    assert header["license"] == yaml.safe_load((folder / "README.md").read_text().split("---")[1])["license"]
    served = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("timm_moe_dg.__main__.main", served.append)
        runpy.run_path(str(space / "app.py"))
    assert served == [["demo", f"hf-hub:{REPOSITORY}"]]
    assert (space / "requirements.txt").read_text().startswith("timm_moe_dg[demo]==")


def test_an_upcycled_model_is_its_dense_source(tmp_path):
    torch.manual_seed(0)
    dense = timm.create_model("deit_tiny_patch16_224", **{**SMALL, "num_classes": 1000, "img_size": 32}).eval()
    fill_cache(tmp_path / "cache", "timm/deit_tiny_patch16_224.fb_in1k", dense.state_dict())
    folder = dry_run(tmp_path, "--upcycled", "gmoe_tiny_patch16", *SIZE)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        torch.testing.assert_close(model(images), dense(images), rtol=0, atol=1e-5)
    assert "an upcycled model without training" in (folder / "README.md").read_text()
    assert config_of(folder)["pretrained_cfg"]["interpolation"] == "bicubic"
    first = load_file(folder / "model.safetensors")
    dry_run(tmp_path, "--upcycled", "gmoe_tiny_patch16", *SIZE)
    second = load_file(folder / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)  # routers are a function of the seed


def test_weights_of_a_file_keep_their_classifier(tmp_path):
    network = fine_tuned()
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    words = ["--model", "gmoe_tiny_patch16", "--initial-checkpoint", tmp_path / "weights.safetensors", *SIZE]
    folder = dry_run(tmp_path, *words, "--license", "cc-by-nc-4.0")
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in network.state_dict().items())
    card = (folder / "README.md").read_text()
    assert "license: cc-by-nc-4.0" in card
    assert "| Starting point | the file `weights.safetensors` |" in card


def test_a_model_by_name_keeps_its_calibration_unless_its_logits_change(tmp_path, caplog):
    source = f"local-dir:{write_run(tmp_path / 'run') / 'best'}"
    scores = [Scores(torch.ones(1), torch.ones(1)) for _ in range(2)]
    calibration = Calibration(2.0, identify(load_trained(source)), "", list(CLASSES), *scores, [])
    save_calibration(calibration, tmp_path / "run" / "best")
    folder = dry_run(tmp_path, "--model", tmp_path / "run")
    assert find_calibration(f"local-dir:{folder}", load_trained(f"local-dir:{folder}")).temperature == 2.0
    assert not (dry_run(tmp_path, "--model", source, "--img-size", "64") / "calibration.safetensors").exists()
    assert "its calibration is of other weights or settings, and is left out" in caplog.text


def shortened_names(run):
    path = run / "best" / "config.json"
    path.write_text(path.read_text().replace('"cat",', ""))


def other_head(run):
    weights = load_file(run / "best" / "model.safetensors")
    weights |= {"head.weight": torch.zeros(9, 32), "head.bias": torch.zeros(9)}
    save_file(weights, run / "best" / "model.safetensors")
    path = run / "best" / "config.json"
    path.write_text(path.read_text().replace("weights_sha256", "of_other_weights"))


def cut_off(run):
    path = run / "best" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def unfinished(run):
    (run / "done").unlink()


def local_encoder(run):
    torch.save(released(), run / "satclip.ckpt")
    shutil.rmtree(run / "best")
    write_run(run, fine_tuned("moge_tiny", metadata_encoder=f"satclip:{run / 'satclip.ckpt'}"))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (shortened_names, "CheckpointError: label_names=4 names in config.json: the classifier has 5 classes"),
        (other_head, "CheckpointError: .*head"),
        (cut_off, r"CheckpointError: .*run/best/model\.safetensors': was damaged"),
        (unfinished, "ArgumentError: run=.*: is not a finished run, done missing; give an output folder"),
        (local_encoder, "CheckpointError: metadata_encoder=.*is a local file"),
    ],
)
def test_a_run_that_would_not_load_is_refused_and_leaves_nothing(damage, complaint, tmp_path):
    damage(write_run(tmp_path / "run"))
    with pytest.raises(SystemExit, match=rf"(?s)^push_to_hub\.py: {complaint}"):
        dry_run(tmp_path, tmp_path / "run")
    assert [path for path in (tmp_path / "hub").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "error: .*one of the arguments RUN --model --upcycled is required"),
        (["run", "--upcycled", "gmoe_tiny_patch16"], "error: .*not allowed with"),
        (["run", "--create-pr", "--revision", "x"], "error: .*not allowed with"),
        (["run"], "ArgumentError: run='run'"),
        (["--model", "gmoe_tiny_patch16"], "ArgumentError: model='gmoe_tiny_patch16'"),
        (["--upcycled", "gmoe_tny_patch16"], "ArgumentError: model='gmoe_tny_patch16'"),
        (["--upcycled", "gmoe_tiny_patch16"], "CheckpointError: .*cannot be had"),
        (["run", "--initial-checkpoint", "x"], "ArgumentError: initial_checkpoint='x'"),
        (["run", "--with-space", "--revision", "x"], "ArgumentError: with_space=True"),
        (["run", "--repo-id", "network"], "ArgumentError: repo_id='network'"),
        (["run", "--repo-id", "some one/x"], "ArgumentError: repo_id='some one/x'"),
    ],
)
def test_mistakes_are_named(words, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_tool("push_to_hub", "--repo-id", REPOSITORY, *words)
    assert re.search(complaint, f"{ended.value} {capsys.readouterr().err}")
