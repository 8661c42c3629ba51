"""The short forms of the scripts beside this file: counts, and memory per item, never a time."""

import os
import shlex
import tracemalloc
from pathlib import Path

import pytest

from timm_moe_dg.data import get_benchmark
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.results.runs import find_runs
from timm_moe_dg.results.tables import make_tables

from ..load_tool import load_tool
from . import collecting, processes, reading, steps, sweeping

FILES, ROWS = 4_140, 3_000  # two of each class and domain


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    reading.write_table(root, reading.write_images(root, FILES)[:ROWS])
    return root


@pytest.mark.parametrize(("dataset", "count"), [("folder", FILES), ("place_folder", ROWS)])
def test_an_image_takes_its_path_and_some_numbers(images: Path, dataset: str, count: int) -> None:
    columns = ("year",) if dataset == "place_folder" else ()
    get_benchmark(dataset).read(images, columns)  # what is kept from the first time on does not count
    tracemalloc.start()
    domains = get_benchmark(dataset).read(images, columns)
    size = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    assert sum(map(len, domains)) == count
    path = len(domains[0].file(0))
    classes = 100 * reading.CLASSES / count  # bytes of their names and their tuple, for each image
    assert size < 1.3 * (path + 60) + classes  # a list of strings takes path + 57, and as much again in each worker


def test_invented_runs_are_read_as_written(tmp_path: Path) -> None:
    collecting.write_runs(tmp_path, 40)
    runs, _ = find_runs([tmp_path])
    assert len(runs) == 40
    assert sum(len(run.records) for run in runs) == 40 * len(collecting.STEPS)
    for run in runs:
        lines = (run.folder / "results.jsonl").read_text().splitlines()
        assert list(run.records) == [Record.from_json(line) for line in lines]
    assert {run.model for run in make_tables(runs)[0].runs} >= set(collecting.MODELS)


def test_a_sweep_of_which_half_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = sweeping.write_finished(tmp_path, 1)
    assert count == 80
    tool = load_tool("sweep")
    for word, expected in (("--dry-run", count // 2), ("--status", count // 2)):
        tool.main(sweeping.command(tmp_path, 1, word)[2:])
        lines = capsys.readouterr().out.splitlines()
        assert len([line for line in lines if "-trial0-" in line]) == expected
    assert f"{count // 2} finished" in "\n".join(lines)


def test_a_process_is_counted_once() -> None:
    found = processes.family(os.getpid())
    assert found[0].pid == os.getpid()
    assert len({one.pid for one in found}) == len(found)
    assert 0 < found[0].private <= found[0].pss <= found[0].rss <= found[0].peak


def test_the_long_run_is_one_of_finetune(tmp_path: Path) -> None:
    words = steps.command(tmp_path / "run", 4, 2)
    options = load_tool("finetune").build_parser().parse_args(words[2:])
    assert (options.steps, options.eval_freq, options.workers) == (4, 2, 2), shlex.join(words)
