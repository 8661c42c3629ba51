"""tools/report.py: where the page goes, and how it refuses."""

import pytest

from tests.invented import write_sweep
from tests.load_tool import load_tool


def test_the_page_lies_in_the_folder_or_where_it_is_asked_for(tmp_path, capsys):
    write_sweep(tmp_path / "sweep", trial_seeds=(0,), hparams_seeds=(0,))
    load_tool("report").main([str(tmp_path / "sweep")])
    load_tool("report").main([str(tmp_path / "sweep"), "--output", str(tmp_path / "page.html")])
    pages = [tmp_path / "sweep" / "report.html", tmp_path / "page.html"]
    assert pages[0].read_text() == pages[1].read_text()
    assert capsys.readouterr().out == "".join(f"written: {page}\n" for page in pages)


def test_a_folder_that_is_no_run_ends_with_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"^report\.py: ArgumentError: folder=.* holds no run") as ended:
        load_tool("report").main([str(tmp_path)])
    assert "\n" not in str(ended.value)
    assert not list(tmp_path.iterdir())
