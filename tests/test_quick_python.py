"""The quick Python ends with the output, the status and the folder that Python itself would end with."""

import subprocess
import sys

import pytest

from tests.quick_python import quick_python

PROGRAMS = [
    (["-c", "import sys, os; print(sys.argv, os.getcwd()); print('e', file=sys.stderr)", "a b"], 0),
    (["-c", "raise SystemExit('no such file')"], 1),
    (["-c", "import sys; sys.exit(3)"], 3),
    (["-c", "1 / 0"], 1),
    (["-c", "import atexit; atexit.register(print, 'last')"], 0),
    (["-m", "json.tool", "--help"], 0),
    (["script.py", "x"], 0),
]


@pytest.fixture(scope="module")
def quick():
    with quick_python("json") as executable:
        yield executable


@pytest.mark.parametrize(("words", "status"), PROGRAMS, ids=str)
def test_a_program_ends_as_with_python(quick, words, status, tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(__name__, sys.argv)")
    ends = [
        subprocess.run([python, *words], cwd=tmp_path, capture_output=True, text=True)
        for python in (sys.executable, quick)
    ]
    assert [end.returncode for end in ends] == [status] * 2
    assert ends[0].stdout == ends[1].stdout
    assert ends[0].stderr.splitlines()[-1:] == ends[1].stderr.splitlines()[-1:]
