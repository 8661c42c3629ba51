"""Every module has a test file in its place: timm_moe_dg/ROOM/FILE.py and tests/ROOM/test_FILE.py."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, TOOLS = ROOT / "timm_moe_dg", ROOT / "tools"

# Module -> where it is tested instead, and why
ELSEWHERE = {
    **dict.fromkeys(
        (f"models/{name}.py" for name in ("_build", "_geo_vit", "_moe_vit", "gmoe", "hybrid_sfmoe", "sfmoe")),
        "tests/models/test_registration.py",  # and its neighbors: each shows one property of every registered model
    ),
    **dict.fromkeys(
        (f"analysis/{name}.py" for name in ("domains", "experts")),
        "tests/analysis/test_analysis.py",  # one small model whose domains are known beforehand
    ),
    "analysis/canvas.py": "tests/analysis/test_curves.py",  # pictures that can, and cannot, be drawn
    "analysis/theorem_plots.py": "tests/tools/test_reproduce_theorem1.py",  # drawn from what the experiments measure
    "analysis/domain_report.py": "tests/tools/test_visualize.py",  # reports are shown by drawing whole runs
    "analysis/run_view.py": "tests/tools/test_visualize.py",
    **dict.fromkeys(
        (f"analysis/evaluation/{name}.py" for name in ("evaluated", "files", "table", "projection_plots")),
        "tests/tools/test_evaluate.py",  # the tool's table and files are theirs
    ),
    **dict.fromkeys(
        (
            f"analysis/routing/{name}.py"
            for name in ("members", "statistics_report", "shown", "association_plots", "map_report", "map_plots")
        ),
        "tests/tools/test_visualize.py",
    ),
    "data/decoders.py": "tests/data/readers/test_images.py",  # what is refused
    "data/benchmarks/drawn.py": "tests/data/benchmarks/test_table.py",  # rows like the others
    "report/network_page.py": "tests/report/test_pages.py",  # sections are shown by whole pages
    "report/model_pictures.py": "tests/report/test_pages.py",
    "finetuning/log.py": "tests/tools/test_finetune_extend.py",  # what a run says, in its folder
    "finetuning/summary.py": "tests/finetuning/test_plan.py",  # it says what is planned
    "models/gmoe_backbone.py": "tests/models/test_upcycling.py",
    "models/moge_backbone.py": "tests/models/test_geo_upcycling.py",
    "models/_backbone.py": "tests/models/test_upcycling.py",  # and the one above
    "finetuning/run.py": "tests/tools/test_finetune.py",  # whole runs, and test_finetune_resume.py
}


def mirror(module: Path) -> Path:
    return ROOT / "tests" / module.parent / f"test_{module.name.lstrip('_')}"


def modules() -> list[Path]:
    return [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]


def test_every_module_has_its_test_file() -> None:
    assert len(modules()) > 100
    assert sorted(str(path) for path in modules() if not mirror(path).exists() and str(path) not in ELSEWHERE) == []


def test_every_tool_has_its_test_file() -> None:
    tools = list(TOOLS.glob("*.py"))
    assert len(tools) > 8
    assert [path.name for path in tools if not (ROOT / "tests" / "tools" / f"test_{path.name}").exists()] == []


def test_exceptions_are_true() -> None:
    for name, place in ELSEWHERE.items():
        assert Path(name) in modules()
        assert not mirror(Path(name)).exists(), name
        assert (ROOT / place).is_file()
