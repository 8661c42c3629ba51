"""DomainNet: images that are listed as duplicates are left out."""

import logging

import pytest

from tests.data.copies import small, write_domains
from timm_moe_dg.data.readers.folders import DUPLICATES
from timm_moe_dg.errors import DataError


@pytest.mark.parametrize("place", ["among", "beside"])
def test_listed_duplicates_are_left_out(tmp_path, place, caplog):
    row = small("DomainNet", num_classes=7)
    root = write_domains(tmp_path / "domain_net", row.domains)
    listed = ["clipart/class_1/clipart_0.png", "real/class_6/real_1.png", "real/class_6/removed_already.png"]
    folder = root if place == "among" else tmp_path
    (folder / DUPLICATES).write_text("\n".join(listed) + "\n\n")
    with caplog.at_level(logging.INFO, "timm_moe_dg"):
        domains = row.read(tmp_path)
    everything = {path.relative_to(root).as_posix() for path in root.rglob("*.png")}
    found = {path.removeprefix(f"{root}/") for domain in domains for path in domain.paths}
    assert found == everything - set(listed)
    assert f"2 of the 3 images listed in {folder / DUPLICATES} left out" in caplog.text
    for domain in domains:
        assert all(domain.classes[target] in path for target, path in zip(domain.targets, domain.paths, strict=True))


def test_without_a_list_nothing_is_left_out(tmp_path):
    row = small("DomainNet", num_classes=7)
    write_domains(tmp_path, row.domains)
    assert [len(domain) for domain in row.read(tmp_path)] == [14] * 6


def test_a_list_that_is_no_text_is_named(tmp_path):
    row = small("DomainNet", num_classes=7)
    write_domains(tmp_path, row.domains)
    (tmp_path / DUPLICATES).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=rf"{DUPLICATES}.*cannot be read as a list of images"):
        row.read(tmp_path)
