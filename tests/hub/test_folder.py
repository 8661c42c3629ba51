"""What goes into the folder that is published."""

import json

from tests.hub.test_card import card_of_run


def test_published_records_keep_their_numbers_and_lose_the_paths_of_this_machine(tmp_path):
    card_of_run(tmp_path, data_dir="/home/me/images", output="output")
    before, after = (
        [json.loads(line) for line in (tmp_path / place / "results.jsonl").read_text().splitlines()]
        for place in ("run", "folder")
    )
    assert [row["args"].pop("data_dir") for row in before] == ["/home/me/images"] * 3
    assert [row["args"].pop("data_dir") for row in after] == ["images"] * 3
    assert after == before
