"""Pages: complete, closed in themselves, escaped, and never blank."""

import sys
from dataclasses import replace

import pytest

from tests.invented import invented_records, write_run, write_sweep
from tests.report.helpers import EVIL_CLASSES, EVIL_DOMAINS, Page, made_run, paint
from tests.saved_run import saved_run
from timm_moe_dg.data.readers.digits import CLASSES
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.report.network_facts import ReportSettings
from timm_moe_dg.report.pages import report
from timm_moe_dg.results.new_site import percent

pytestmark = pytest.mark.slow  # whole runs, programs and processes

VERDICT = ("new-site", "confusion")  # stand above the warnings
SECTIONS = (*VERDICT, "selection", "domains", "worst", "calibration", "curves", "experts", "settings")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return paint(tmp_path_factory.mktemp("data"), EVIL_DOMAINS, EVIL_CLASSES)


def page_of(folder, **settings):
    report(folder, folder / "page.html", ReportSettings(**settings))
    text = (folder / "page.html").read_text()
    page = Page(text)
    assert [link for link in page.links if not link.startswith(("data:image/", "#"))] == []
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert "script" not in page.tags
    assert "url(" not in text
    assert "@import" not in text
    assert len(text) < 5_000_000
    return page


@pytest.fixture(scope="module")
def evil(tmp_path_factory, data):
    return page_of(made_run(tmp_path_factory.mktemp("runs") / "<i>run", data))


def test_a_run_has_all_sections_and_pictures(evil):
    pytest.importorskip("matplotlib")
    assert tuple(evil.ids) == SECTIONS
    assert "too few to show what to expect at a new site" in evil.text
    places = list(map(evil.text.index, ("too few to show", "Most frequent:", "This is one run", "Results by")))
    assert places == sorted(places)
    assert evil.tags.count("img") > 3
    assert "Expert selection" in evil.text
    assert "Attention" in evil.text
    assert "Not available" not in evil.text
    assert "pip install" not in evil.text


def test_names_with_markup_are_text(evil):
    for name in (*EVIL_DOMAINS, *EVIL_CLASSES, "<i>run"):
        assert name in evil.text
    assert not {"b", "i"} & set(evil.tags)


def test_only_what_differs_from_the_defaults_is_listed(evil):
    assert "lr 0.25" in evil.text
    assert "--lr 0.25" in evil.text
    assert "aux_coef" not in evil.text
    assert "holdout_fraction" not in evil.text


def test_a_dense_model_says_so_in_place_of_experts(tmp_path, data):
    page = page_of(made_run(tmp_path / "run", data, model="deit_tiny_patch16_224"))
    assert "is a dense model without experts" in page.text
    assert "Expert selection" not in page.text
    assert "Attention" in page.text
    assert tuple(page.ids) == SECTIONS


def test_without_matplotlib_the_rest_is_there_and_the_extra_is_named(tmp_path, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = page_of(made_run(tmp_path / "run", data))
    assert page.text.count("pip install 'timm_moe_dg[plots]'") == 5  # curves, confusions, calibration, and two maps
    assert "with the highest confidence" in page.text
    assert "blocks.1.mlp" in page.text


def test_a_run_without_its_network_or_its_data_has_the_rest(tmp_path, data):
    bare = write_run(tmp_path / "bare", invented_records([0], steps=601))
    assert "best/" in page_of(bare).text
    moved = page_of(made_run(tmp_path / "moved", tmp_path / "nowhere"))
    assert "no such folder" in moved.text
    assert "Selection" in moved.text


def test_a_damaged_network_is_named(tmp_path, data):
    folder = made_run(tmp_path / "run", data)
    (folder / "best" / "model.safetensors").write_bytes(b"half")
    assert "cannot" in page_of(folder).text


@pytest.mark.parametrize(("classes", "domains"), [(1, 2), (16, 12)])
def test_awkward_sizes(tmp_path, classes, domains):
    names = [f"class number {number}" for number in range(classes)], [f"d{number}" for number in range(domains)]
    paint(tmp_path / "data", names[1], names[0], images=1)
    page = page_of(made_run(tmp_path / "run", tmp_path / "data", names[1], names[0]))
    assert tuple(page.ids) == SECTIONS
    assert "Worst tested domain: d0" in page.text


def test_a_run_without_test_domains_has_a_worst_domain_that_is_not_called_tested(tmp_path, data):
    page = page_of(made_run(tmp_path / "run", data, test_domains=[]))
    assert "Worst domain: " in page.text
    assert "Worst tested domain" not in page.text


def test_domains_without_images_have_a_dash(tmp_path):
    """A domain with too few images for an out-split has none that were not trained on."""
    data = paint(tmp_path / "data", ["a", "b"], ["x", "y"], images=2)
    page = page_of(made_run(tmp_path / "run", data, ["a", "b"], ["x", "y"]))
    assert "b 0 - - -" in page.text


def test_names_that_are_broken_formulas_are_drawn_as_they_are(tmp_path):
    data = paint(tmp_path / "data", ["a", "b"], ["$\\frac{$", "y"], images=8)
    page = page_of(made_run(tmp_path / "run", data, ["a", "b"], ["$\\frac{$", "y"]))
    assert "matplotlib cannot draw this" not in page.text
    assert "with the highest confidence" in page.text


def test_images_are_limited_and_the_page_says_so(tmp_path, data):
    assert "on 9 of 18 images" in page_of(made_run(tmp_path / "run", data), max_images=3).text


def test_an_unfinished_run_is_named_as_such(tmp_path):
    folder = write_run(tmp_path / "run", invented_records([0], steps=5001), finished=False)
    assert "not finished (incomplete, step 601 of 5001)" in page_of(folder).text


def test_a_diverged_run_says_so(tmp_path):
    folder = write_run(tmp_path / "sweep" / "run", invented_records([0]), finished=False)
    (tmp_path / "sweep" / "logs").mkdir()
    error = "finetune.py: DivergenceError: step=7: the loss is nan"
    (tmp_path / "sweep" / "logs" / "run.log").write_text(f"{error}\nsweep: exit status 1\n")
    assert "This run diverged: finetune.py: DivergenceError" in page_of(folder).text
    assert "This run diverged" in page_of(tmp_path / "sweep").text


def test_selection_at_chance_is_on_the_page(tmp_path):
    records = [replace(record, out_acc=(0.9, 0.14, 0.14)) for record in invented_records([0], num_classes=10)]
    assert "Selection is at chance" in page_of(write_run(tmp_path / "run", records)).text


def test_a_folder_without_a_run_is_refused_and_nothing_is_written(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ArgumentError, match="holds no run"):
            report(folder, tmp_path / "page.html", ReportSettings())
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(ArgumentError, match="no evaluation yet"):
        report(tmp_path, tmp_path / "page.html", ReportSettings())
    assert not (tmp_path / "page.html").exists()


def test_a_sweep_compares_rows_with_dots_and_tests(tmp_path):
    for model in ("vit", "<u>moe"):
        write_sweep(tmp_path / model, hparams_seeds=(0,), model=model)
    page = page_of(tmp_path)
    assert tuple(page.ids) == ("new-site", "tables", "runs", "settings")
    assert "hold out at least 4 domains before you decide, because these are 3" in page.text
    assert "ERM, <u>moe − ERM, vit" in page.text  # noqa: RUF001 (a minus)
    assert "u" not in page.tags
    assert page.tags.count("i") == 2 * 3 * (3 + 3) * 4  # rows, seeds, rules and single sources, columns
    assert "p, Holm" not in page.text


def test_each_data_set_of_a_sweep_has_its_recommendation(tmp_path):
    for name in ("one", "two"):
        write_sweep(tmp_path / name, trial_seeds=(0,), hparams_seeds=(0,), num_domains=4, dataset=name)
    write_run(tmp_path / "alone", invented_records([0], dataset="three"))
    text = page_of(tmp_path).text
    assert text.count("Accuracy to expect at a new site") == 2
    assert "held-out domains='domain 0': too few" in text
    assert text.index("95% prediction interval") < text.index("All runs have the same trial seed")


def test_a_sweep_shows_its_unfinished_and_missing_runs(tmp_path):
    write_sweep(tmp_path, trial_seeds=(0,), hparams_seeds=(0, 1), skip=[((1,), 0, 0)], steps=700)
    write_run(tmp_path / "half", invented_records([1], steps=700), finished=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "results.jsonl").write_text("")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "died.log").write_text("out of memory\nsweep: exit status 1\n")
    page = page_of(tmp_path)
    assert "half incomplete step 601 of 700" in page.text
    assert "died failed no evaluation yet" in page.text
    assert "empty incomplete" in page.text
    assert "Unfinished runs: 3 of 14" in page.text
    assert "the same trial seed" in page.text
    assert "test domains [1], trial seeds [0]" in page.text


def test_runs_of_two_sweeps_that_have_one_name_are_told_apart(tmp_path):
    for sweep, accuracy in (("a", 0.1), ("b", 0.9)):
        records = [
            replace(record, out_acc=(0.1, accuracy, accuracy)) for record in invented_records([0], num_classes=10)
        ]
        write_run(
            tmp_path / sweep / "run", [replace(record, args={**record.args, "lr": accuracy}) for record in records]
        )
    write_run(tmp_path / "a" / "other", invented_records([1], num_classes=10))
    write_run(tmp_path / "final", [replace(record, out_acc=(0.8,) * 3) for record in invented_records([])])
    (tmp_path / "b" / "logs").mkdir()
    (tmp_path / "b" / "logs" / "other.log").write_text("out of memory\nsweep: exit status 1\n")
    page = page_of(tmp_path)
    assert page.text.count("(at chance)") == 1
    assert "other failed no evaluation yet" in page.text
    assert "final 0 80.0 -" in page.text  # trained on all domains


def test_a_sweep_without_a_finished_run_has_a_page(tmp_path):
    write_run(tmp_path / "half", invented_records([1], steps=700), finished=False)
    page = page_of(tmp_path)
    assert "No run is finished yet" in page.text
    assert "half incomplete" in page.text


def test_a_share_that_is_none_is_a_dash():
    assert (percent(0.1234), percent(float("nan"))) == ("12.3", "-")


def test_a_mixture_of_geographic_experts_has_a_map_of_its_domains(tmp_path):
    pytest.importorskip("matplotlib")
    args = {"dataset": "geo_digits", "model": "moge_tiny", "num_classes": 10, "test_domains": list(range(5, 11))}
    folder = write_run(tmp_path / "run", invented_records(range(5, 11), num_domains=11, **args))
    saved_run(folder, "moge_tiny", CLASSES)
    page = page_of(folder, max_images=10)
    assert "Discovered domains" in page.text
    assert "mutual information with the data's groups: 0." in page.text
    assert "blocks.1.mlp" in page.text
    assert "There is nothing to draw" not in page.text
