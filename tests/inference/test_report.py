"""Report pages are complete, closed in themselves and escaped, with the numbers of the network and the records."""

import sys
from dataclasses import replace
from html.parser import HTMLParser
from math import nan
from pathlib import Path

import pytest
import torch

from tests.data.files import write_noise
from tests.invented import invented_records, write_run, write_sweep
from tests.load_tool import run_tool
from tests.saved_run import SMALL, saved_run
from timm_moe_dg.analysis.run_view import open_run
from timm_moe_dg.data.readers.digits import CLASSES as DIGITS
from timm_moe_dg.data.readers.folders import read_folder
from timm_moe_dg.data.splits import group_part, split_domains
from timm_moe_dg.errors import ArgumentError, DataError, RecordError
from timm_moe_dg.inference.report import ReportSettings, cautions, evaluate_network, read_run, report
from timm_moe_dg.networks.build import build_network, data_config, save_network
from timm_moe_dg.networks.trained import class_positions

EVIL_CLASSES, EVIL_DOMAINS = ("<script>alert(1)", "a & b", 'quo"te', "$\\frac{$"), ("<b>bold", "plain", "x" * 70)
DOMAINS, CLASSES = ("a", "b", "c"), ("x", "y", "z")
SECTIONS = ("at-a-new-site", "warnings", "results", "the-network-on-new-images", "experts-and-attention")
ALWAYS = ("at-a-new-site", "warnings", "results", "runs")
LOADING = {"src", "href", "srcset", "action", "data", "poster", "background"}


class Page(HTMLParser):
    """Reads a page, and refuses one whose elements do not close in order or that loads anything."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.ids, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open
        assert not {"script", "link"} & set(self.tags)
        assert "url(" not in text
        assert "@import" not in text
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        assert all(value.startswith(("data:image/", "#")) for name, value in attrs if name in LOADING)
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in {"meta", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def page_of(folder: Path, **settings) -> Page:
    output = folder.parent / "page.html"
    report(folder, output, ReportSettings(**settings))
    return Page(output.read_text())


def made_run(folder: Path, data: Path, domains=DOMAINS, classes=CLASSES, model="gmoe_tiny_patch16", **args) -> Path:
    """Writes a run that holds out the first domain."""
    domains, classes = sorted(domains), sorted(classes)
    words = {"dataset": "folder", "data_dir": str(data), "domains": domains, "num_classes": len(classes)}
    words |= {"test_domains": [0], "steps": 601, "model": model, "lr": 0.25, **args}
    records = invented_records([0], num_domains=len(domains), **words)
    write_run(folder, [replace(record, out_acc=(1.0,) * len(domains)) for record in records])
    if model == "gmoe_tiny_patch16":
        saved_run(folder, model, tuple(classes))
    else:
        small = {key: SMALL[key] for key in ("embed_dim", "depth", "num_heads")}
        network = build_network(model, len(classes), img_size=32, model_kwargs=small)
        save_network(network, folder / "best", tuple(classes), data_config(network, 32))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_noise(tmp_path_factory.mktemp("data"), EVIL_DOMAINS, EVIL_CLASSES, images=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory, data):
    return made_run(tmp_path_factory.mktemp("runs") / "<i>run", data, EVIL_DOMAINS, EVIL_CLASSES)


@pytest.mark.slow
def test_a_run_has_all_sections_and_pictures_and_names_with_markup_are_text(run):
    pytest.importorskip("matplotlib")
    page = page_of(run)
    assert tuple(page.ids) == (*SECTIONS, "runs", "learning-curves", "command")
    assert page.tags.count("img") == 5  # confusions, reliability, experts, attention, curves
    assert "too few to show what to expect at a new site" in page.text
    for name in (*EVIL_DOMAINS, "<i>run"):
        assert name in page.text
    assert not {"b", "i"} & set(page.tags)
    assert "--lr 0.25" in page.text
    assert "aux_coef" not in page.text  # has its default


@pytest.mark.slow
def test_without_experts_data_network_or_matplotlib_a_page_has_the_rest(run, data, tmp_path, monkeypatch):
    page = page_of(made_run(tmp_path / "dense", data, EVIL_DOMAINS, EVIL_CLASSES, model="deit_tiny_patch16_224"))
    assert "is a dense model without experts" in page.text
    assert page.tags.count("img") == 4
    assert "no such folder" in page_of(made_run(tmp_path / "moved", tmp_path / "nowhere")).text
    damaged = made_run(tmp_path / "damaged", data, EVIL_DOMAINS, EVIL_CLASSES)
    (damaged / "best" / "model.safetensors").write_bytes(b"half")
    bare = write_run(tmp_path / "bare", invented_records([0], steps=601))
    for folder in (damaged, bare):
        page = page_of(folder)
        assert tuple(page.ids) == (*ALWAYS[:3], "the-selected-network", *ALWAYS[3:], "learning-curves", "command")
        assert "best" in page.text
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = page_of(run)
    assert page.text.count("pip install 'timm_moe_dg[plots]'") == 5


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "domains", "images"), [(1, 2, 1), (16, 12, 16)])
def test_awkward_sizes(tmp_path, classes, domains, images):
    names = [f"d{number}" for number in range(domains)], [f"class number {number}" for number in range(classes)]
    data = write_noise(tmp_path / "data", *names, images=1)
    page = page_of(made_run(tmp_path / "run", data, *names))
    assert f"d0 (tested) {images} " in page.text
    assert ("d1 0 - - -" in page.text) == (classes == 1)  # too few images for an out-split


@pytest.mark.slow
def test_a_mixture_of_geographic_experts_has_a_map_of_its_domains(tmp_path):
    pytest.importorskip("matplotlib")
    args = {"dataset": "geo_digits", "model": "moge_tiny", "num_classes": 10, "test_domains": list(range(5, 11))}
    folder = write_run(tmp_path / "run", invented_records(range(5, 11), num_domains=11, **args))
    saved_run(folder, "moge_tiny", DIGITS)
    page = page_of(folder, max_images=10)
    assert "The routed expert with the largest weight at each place." in page.text
    assert page.tags.count("img") == 6


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    """The evaluation of a run, and for each domain (predicted, target, confidence) by hand."""
    root = tmp_path_factory.mktemp("run")
    data = write_noise(root / "data", DOMAINS, CLASSES, images=8)
    view = open_run(made_run(root / "run", data, trial_seed=5))
    domains = read_folder(data)
    splits = split_domains(domains, [], trial_seed=5, holdout_fraction=0.2)
    by_hand = []
    for index, (domain, split) in enumerate(zip(domains, splits, strict=True)):
        rows = []
        for position in sorted([*split.inside, *split.outside]) if index == 0 else split.outside:
            with torch.no_grad():
                confidence, predicted = view.model(view.inputs([domain.image(position)])).softmax(1)[0].max(0)
            predicted = class_positions(view.model, domain.classes)[predicted]
            rows.append((predicted.item(), domain.targets[position], confidence.item()))
        by_hand.append(rows)
    return evaluate_network(view, ReportSettings(batch_size=5)), by_hand


def test_scores_and_confusions_are_of_images_that_were_not_trained_on(by_hand):
    evaluated, rows_of = by_hand
    assert [scores.images for scores in evaluated.assessment.domains] == [24, 4, 4] == list(map(len, rows_of))
    right = [sum(row[0] == row[1] for row in rows) / len(rows) for rows in rows_of]
    assert [scores.accuracy for scores in evaluated.assessment.domains] == pytest.approx(right)
    assert evaluated.is_counted.tolist() == [True] * 24 + [False] * 8
    assert evaluated.outputs.confidence.tolist() == pytest.approx([r[2] for rows in rows_of for r in rows], abs=1e-5)
    counts = torch.zeros(3, 3, dtype=torch.long)
    for predicted, target, _ in rows_of[0]:
        counts[target, predicted] += 1
    assert evaluated.confusion.equal(counts)


def test_limited_images_are_the_same_ones_each_time_and_every_out_split_counts_without_test_domains(tmp_path):
    data = write_noise(tmp_path / "data", DOMAINS, CLASSES, images=4)
    view = open_run(made_run(tmp_path / "run", data))
    first, second = (evaluate_network(view, ReportSettings(max_images=2)) for _ in range(2))
    assert first.images.positions.tolist() == second.images.positions.tolist()
    assert [scores.images for scores in first.assessment.domains] == [2, 2, 2]
    view = open_run(made_run(tmp_path / "final", data, test_domains=[]))
    evaluated = evaluate_network(view, ReportSettings())
    assert [scores.images for scores in evaluated.assessment.domains] == [2, 2, 2]
    assert int(evaluated.confusion.sum()) == 6
    small = write_noise(tmp_path / "small", DOMAINS, CLASSES, images=1)
    with pytest.raises(DataError, match="no image that the network was not trained on"):
        evaluate_network(open_run(made_run(tmp_path / "none", small, test_domains=[])), ReportSettings())


def test_images_of_a_run_that_was_split_by_photograph_are_those_that_were_not_trained_on(tmp_path):
    data = write_noise(tmp_path / "data", DOMAINS, CLASSES, images=30)
    view = open_run(made_run(tmp_path / "run", data, split_by_photograph=True))
    evaluated = evaluate_network(view, ReportSettings())
    for index, domain in enumerate(read_folder(data)):
        positions = evaluated.images.positions[evaluated.images.groups // 2 == index].tolist()
        parts = ["validation"] if index else ["test", "validation"]
        assert positions == [row for row, path in enumerate(domain.paths) if group_part(Path(path).stem) in parts]


def cautions_of(folder, finished=True, **changes):
    args = {key: changes.pop(key) for key in ("num_classes", "split_sizes") if key in changes}
    records = [replace(record, **changes) for record in invented_records([1], **args)]
    return cautions(read_run(write_run(folder, records, finished)))


@pytest.mark.parametrize(
    ("classes", "accuracy", "expected"),
    [(2, 0.54, True), (2, 0.56, False), (100, 0.016, False), (10, 0.14, True), (10, 0.16, False), (10, nan, True)],
)
def test_chance_depends_on_the_number_of_classes(tmp_path, classes, accuracy, expected):
    texts = cautions_of(tmp_path / "run", num_classes=classes, out_acc=(accuracy,) * 3)
    assert any("hardly above guessing" in text for text in texts) == expected


def test_cautions_name_divergence_an_unfinished_run_and_few_validation_images(tmp_path):
    good = {"out_acc": (0.5, 0.5, 0.75), "split_sizes": [[80, 200], [300, 60], [80, 1]]}
    assert not any("Diverged" in text or "rests on" in text for text in cautions_of(tmp_path / "good", **good))
    assert any("not finite" in text for text in cautions_of(tmp_path / "bad", losses={"loss": nan}))
    few = cautions_of(tmp_path / "few", split_sizes=[[80, 2], [300, 60], [80, 1]])
    assert "Selection rests on 3 validation images of the training domains" in few
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "half.log").write_text("DivergenceError: step=7: the loss is nan\nsweep: exit status 1\n")
    unfinished, diverged, *_ = cautions_of(tmp_path / "half", finished=False)
    assert unfinished == "Not finished (failed), so the numbers will change"
    assert diverged == "Diverged (DivergenceError: step=7: the loss is nan)"


def test_the_page_lies_in_the_folder_or_where_it_is_asked_for(tmp_path, capsys):
    write_sweep(tmp_path / "sweep", trial_seeds=(0,), hparams_seeds=(0,))
    run_tool("report", tmp_path / "sweep")
    run_tool("report", tmp_path / "sweep", "--output", tmp_path / "page.html")
    pages = [tmp_path / "sweep" / "report.html", tmp_path / "page.html"]
    assert pages[0].read_text() == pages[1].read_text()
    assert capsys.readouterr().out == "".join(f"written: {page}\n" for page in pages)


def test_a_folder_without_a_run_is_refused_and_nothing_is_written(tmp_path):
    output = tmp_path / "page.html"
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises((ArgumentError, RecordError), match="folder="):
            report(folder, output, ReportSettings())
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(ArgumentError, match="no evaluation yet"):
        report(tmp_path, output, ReportSettings())
    for finished in (True, False):
        folder = write_run(tmp_path / str(finished), invented_records([1]), finished)
        with (folder / "results.jsonl").open("a") as file:
            file.write('{"step"')
    assert len(read_run(tmp_path / "False").records) == 3  # it may be writing the line
    with pytest.raises(RecordError, match="line 4"):
        report(tmp_path / "True", output, ReportSettings())
    assert not output.exists()


@pytest.mark.slow
def test_a_sweep_has_tables_bars_and_its_unfinished_and_missing_runs(tmp_path):
    sweep = tmp_path / "sweep"
    for model in ("vit", "<u>moe"):
        skip = [((1,), 0, 0)] if model == "vit" else []
        write_sweep(sweep / model, trial_seeds=(0,), hparams_seeds=(0,), skip=skip, model=model, steps=700, lr=0.5)
    write_run(sweep / "half", invented_records([1], steps=700), finished=False)
    page = page_of(sweep)
    assert tuple(page.ids) == ALWAYS
    assert "u" not in page.tags
    assert page.tags.count("img") == 1
    assert "ERM <u>moe" in page.text
    assert "Not finished, and left out of the tables: half" in page.text
    assert "half incomplete, 601 of 700 steps" in page.text
    assert "test domains [1], trial seeds [0]" in page.text
    assert "All results are of one trial seed" in page.text
