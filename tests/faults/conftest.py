"""A small data folder and a small trained network, to be asked for impossible things."""

import pytest

from tests.data.files import write_domains
from tests.load_tool import run_tool
from tests.saved_run import saved_run


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Three domains, two classes, four images of each."""
    return write_domains(tmp_path_factory.mktemp("data"), ("a", "b", "c"), ("cat", "dog"), images=4)


@pytest.fixture(scope="session")
def best(tmp_path_factory):
    """The folder best/ of a run."""
    folder = tmp_path_factory.mktemp("run")
    saved_run(folder, "gmoe_tiny_patch16", ("cat", "dog"))
    return folder / "best"


@pytest.fixture
def ending(tmp_path, monkeypatch, capsys):
    """Runs a tool in an empty folder and returns the one line with which it ends."""
    monkeypatch.chdir(tmp_path)

    def run(tool: str, *words: object) -> str:
        with pytest.raises(SystemExit) as caught:
            run_tool(tool, *words)
        code = caught.value.code
        if isinstance(code, str):
            assert code.startswith(f"{tool}.py: ")
            assert "\n" not in code
            return code
        assert code == 2  # argparse's, which prints its usage before the line
        return capsys.readouterr().err.splitlines()[-1]

    return run
