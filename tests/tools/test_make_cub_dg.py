"""CUB-DG from a miniature of CUB-200-2011: every file, killed and resumed, and what is refused."""

import hashlib
import json
import multiprocessing
import os
import shlex
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cub_miniature import write_cub
from tests.load_tool import load_tool
from timm_moe_dg.data import read_folder
from timm_moe_dg.data.splits import photograph_part
from timm_moe_dg.data.style_transfer import StyleTransferNetwork

DOCS = Path(__file__).parents[2] / "docs"
TOOL = load_tool("make_cub_dg")
STYLES = ("Candy", "Mosaic", "Natural", "Udnie")


@pytest.fixture(scope="module")
def cub(tmp_path_factory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("cub")
    return folder, write_cub(folder)


@pytest.fixture(scope="module")
def made(cub, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    TOOL.main([str(cub[0]), str(out), "--style", "approximate"])
    return out / "CUB_DG_approximate"


@pytest.fixture
def weights(tmp_path) -> Path:
    (tmp_path / "styles").mkdir()
    for seed, style in enumerate(("candy", "mosaic", "udnie")):
        torch.manual_seed(seed)
        network = StyleTransferNetwork()
        torch.nn.init.constant_(network.deconv3.conv2d.bias, 128.0)
        torch.save(network.state_dict(), tmp_path / "styles" / f"{style}.pth")
    return tmp_path / "styles"


def table(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def refused(*words: object) -> str:
    with pytest.raises(SystemExit) as caught:
        TOOL.main([str(word) for word in words])
    message = str(caught.value)
    assert message.startswith("make_cub_dg.py: ")
    assert "\n" not in message
    return message


def test_every_photograph_stands_in_four_domains_under_its_name_and_size(cub, made):
    folder, names = cub
    domains = read_folder(made)
    assert tuple(domain.name for domain in domains) == STYLES
    assert {len(domain.classes) for domain in domains} == {200}
    for domain in domains:
        assert sorted(os.path.relpath(path, made / domain.name) for path in domain.paths) == sorted(names)
    for name in names[::37]:
        size = Image.open(folder / "images" / name).size
        assert {Image.open(made / style / name).size for style in STYLES} == {size}
        assert (made / "Natural" / name).read_bytes() == (folder / "images" / name).read_bytes()
        assert len({(made / style / name).read_bytes() for style in STYLES}) == 4


def test_the_manifest_has_the_hash_of_every_file_and_says_what_the_styles_are(made):
    manifest = table(made)
    files = [path for path in made.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert len(files) == len(manifest["files"]) == 4 * 400
    for path in files[::97]:
        found = manifest["files"][path.relative_to(made).as_posix()]
        assert found == {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert (manifest["data_set"], manifest["style"], manifest["weights"]) == ("CUB_DG_approximate", "approximate", None)


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_gives_the_same_hashes(cub, made, tmp_path):
    command = [str(cub[0]), str(tmp_path), "--style", "approximate"]
    journal = tmp_path / "CUB_DG_approximate" / "manifest.unfinished.jsonl"
    random, kept = np.random.RandomState(0), 0
    for kill in range(3):
        process = multiprocessing.get_context("fork").Process(target=TOOL.main, args=(command,))
        process.start()
        while process.is_alive() and (not journal.exists() or journal.read_bytes().count(b"\n") < 60 * (kill + 1)):
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.02))
        process.kill()
        process.join()
        assert process.exitcode == -9
        lines = journal.read_bytes().count(b"\n")
        assert lines > kept
        kept = lines
    first = tmp_path / "CUB_DG_approximate" / json.loads(journal.read_text().splitlines()[1])[0]
    before = first.stat().st_mtime_ns
    TOOL.main(command)
    assert first.stat().st_mtime_ns == before  # what was there is not made again
    assert table(tmp_path / "CUB_DG_approximate") == table(made)
    assert {path.relative_to(tmp_path / "CUB_DG_approximate") for path in journal.parent.rglob("*")} == {
        path.relative_to(made) for path in made.rglob("*")
    }


def test_a_finished_set_is_checked_and_only_what_differs_is_made_again(tmp_path):
    names = write_cub(tmp_path / "cub", classes=3)
    command = [str(tmp_path / "cub"), str(tmp_path), "--style", "approximate", "--natural", "copy"]
    TOOL.main(command)
    folder = tmp_path / "CUB_DG_approximate"
    before = table(folder)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.jpg")}
    assert not any(path.is_symlink() for path in times)
    (folder / "Mosaic" / names[4]).unlink()
    (folder / "Candy" / names[2]).write_bytes(b"?" * (folder / "Candy" / names[2]).stat().st_size)
    TOOL.main(command)
    assert table(folder) == before
    changed = {path for path, at in times.items() if path.stat().st_mtime_ns != at}
    assert changed == {folder / "Mosaic" / names[4], folder / "Candy" / names[2]}


def test_the_network_paints_with_the_weights_of_each_style(tmp_path, weights):
    names = write_cub(tmp_path / "cub", classes=2)
    TOOL.main([str(tmp_path / "cub"), str(tmp_path), "--weights-dir", str(weights)])
    folder = tmp_path / "CUB_DG"
    network = StyleTransferNetwork().eval()
    network.load_state_dict(torch.load(weights / "mosaic.pth", weights_only=True))
    pixels = np.asarray(Image.open(tmp_path / "cub" / "images" / names[1]).convert("RGB"))
    expected = network.restyle(torch.tensor(pixels).permute(2, 0, 1)).permute(1, 2, 0).numpy()
    Image.fromarray(expected).save(tmp_path / "expected.jpg", quality=95)
    assert (folder / "Mosaic" / names[1]).read_bytes() == (tmp_path / "expected.jpg").read_bytes()
    digest = hashlib.sha256((weights / "udnie.pth").read_bytes()).hexdigest()
    assert table(folder)["weights"]["Udnie"] == {"file": "udnie.pth", "sha256": digest}


def test_the_split_by_photograph_goes_into_the_manifest_of_a_set_that_is_there(tmp_path):
    names = write_cub(tmp_path / "cub", classes=3)
    command = [str(tmp_path / "cub"), str(tmp_path), "--style", "approximate"]
    TOOL.main(command)
    assert table(tmp_path / "CUB_DG_approximate")["split_by_photograph"] is None
    TOOL.main([*command, "--split-by-photograph"])
    expected = {Path(name).stem: photograph_part(name) for name in names}
    assert table(tmp_path / "CUB_DG_approximate")["split_by_photograph"] == expected


def test_a_folder_that_is_not_cub_is_refused_in_one_line(tmp_path):
    options = (tmp_path / "out", "--style", "approximate")
    assert "images.txt cannot be read" in refused(tmp_path, *options)
    names = write_cub(tmp_path / "cub", classes=3)
    (tmp_path / "cub" / "images" / names[4]).unlink()
    assert f"1 of 6 photographs are missing, first images/{names[4]}" in refused(tmp_path / "cub", *options)
    for content, words in (
        ("", "found no line"),
        ("1 ../../x.jpg\n", "x.jpg"),
        ("1 a/b.jpg\n2 c/b.jpg\n", "called 'b'"),
    ):
        (tmp_path / "cub" / "images.txt").write_text(content)
        assert words in refused(tmp_path / "cub", *options)
    assert not (tmp_path / "out").exists()


def test_a_photograph_that_cannot_be_decoded_is_named_and_the_rest_goes_on_later(tmp_path):
    names = write_cub(tmp_path / "cub", classes=3)
    damaged = tmp_path / "cub" / "images" / names[3]
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    command = (tmp_path / "cub", tmp_path, "--style", "approximate")
    assert names[3] in refused(*command)
    damaged.write_bytes(content)
    TOOL.main([str(word) for word in command])
    assert len(table(tmp_path / "CUB_DG_approximate")["files"]) == 24


def test_options_weights_and_folders_that_do_not_fit_are_refused_in_one_line(tmp_path, weights):
    write_cub(tmp_path / "cub", classes=2)
    cub = tmp_path / "cub"
    assert "--weights-dir" in refused(cub, tmp_path)
    assert "--weights-dir" in refused(cub, tmp_path, "--style", "approximate", "--weights-dir", weights)
    assert "holds no candy.pth" in refused(cub, tmp_path, "--weights-dir", tmp_path)
    TOOL.main([str(cub), str(tmp_path), "--weights-dir", str(weights)])
    assert "another data set (natural differ)" in refused(cub, tmp_path, "--weights-dir", weights, "--natural", "copy")
    torch.save(StyleTransferNetwork().state_dict(), weights / "candy.pth")
    assert "another data set (weights differ)" in refused(cub, tmp_path, "--weights-dir", weights)
    torch.save(torch.nn.Linear(1, 1).state_dict(), weights / "candy.pth")
    assert "weights of another network" in refused(cub, tmp_path / "new", "--weights-dir", weights)
    assert "cannot be written" in refused(cub, cub / "images.txt", "--style", "approximate")


def test_the_documentations_commands_parse():
    text = (DOCS / "cub_dg.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("python tools/")]
    assert [Path(script).stem for script, *_ in commands] == [*["make_cub_dg"] * 3, "finetune"]
    for script, *arguments in commands:
        load_tool(Path(script).stem).build_parser().parse_args(arguments)
