"""Runs opened for analysis: images that cannot be decoded are left out if asked for, or if the run left them out."""

import pytest
import yaml
from PIL import Image

from tests.load_tool import load_tool
from tests.saved_run import saved_run
from timm_moe_dg.analysis.routing.chosen_images import choose_images
from timm_moe_dg.analysis.run_view import open_run
from timm_moe_dg.errors import ImageReadError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on two domains of three images, one of which is damaged."""
    root = tmp_path_factory.mktemp("root")
    for domain in ("art", "photo"):
        (root / "images" / domain / "cat").mkdir(parents=True)
        for index in range(3):
            Image.new("RGB", (8, 8)).save(root / "images" / domain / "cat" / f"{index}.png")
    (root / "images" / "photo" / "cat" / "1.png").write_bytes(b"garbage")
    args = {"dataset": "folder", "data_dir": str(root / "images"), "test_domains": [0], "img_size": 32}
    saved_run(root / "run", "gmoe_tiny_patch16", ("cat", "dog"), args)
    (root / "run" / "results.jsonl").touch()
    return root / "run"


def names(rows):
    return [image.name for _, row in rows for image in row if image is not None]


def test_damaged_images_of_the_data_and_of_files_are_left_out_if_asked_for(run):
    files = [str(run.parent / "images" / "photo")]
    for images in (None, files):
        with pytest.raises(ImageReadError, match=r"photo/cat/1\.png': cannot be decoded"):
            choose_images(open_run(run), images, None, 4)
    view = open_run(run, skip_unreadable=True, split_by_photograph=True)
    assert [len(domain) for domain in view.domains] == [3, 2]
    assert names(choose_images(view, None, None, 4)) == ["0", "2", "1", "0", "2"]
    assert names(choose_images(view, files, None, 4)) == ["0.png", "2.png"]
    with pytest.raises(ImageReadError, match="none can be decoded"):
        choose_images(view, [f"{files[0]}/cat/1.png"], None, 4)


def test_by_default_a_run_s_own_choice_is_repeated(run, tmp_path):
    args = yaml.safe_load((run / "args.yaml").read_text())
    other = run.with_name("skipping")
    other.mkdir()
    (other / "best").symlink_to(run / "best")
    (other / "results.jsonl").touch()
    (other / "args.yaml").write_text(yaml.safe_dump({**args, "skip_unreadable": True}))
    assert [len(domain) for domain in open_run(other).domains] == [3, 2]
    assert [len(domain) for domain in open_run(other, skip_unreadable=False).domains] == [3, 3]


def test_every_command_that_reads_images_has_the_option():
    tool = load_tool("visualize")
    for command in tool.COMMANDS.keys() - {"curves", "data"}:  # of a run
        assert tool.build_parser().parse_args([command, "run", "--skip-unreadable"]).skip_unreadable
