"""The short forms of the scripts beside this file: counts, never a time."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from ..load_tool import load_tool
from . import engines, expert_floor, processes, programs, short_run
from .timed_program import Seen


def test_what_is_read_is_what_one_image_visits() -> None:
    torch.manual_seed(0)
    size, steps = expert_floor.make_steps(197, 4, torch.float32)
    assert size == 4 * 2 * expert_floor.FEATURES * expert_floor.HIDDEN * 4  # 197 tokens leave no expert out
    assert list(steps)[:4] == ["reading", "sorted", "grouped", "loop"]
    for step in steps.values():
        step()


def test_the_products_of_experts_and_of_the_dense_layer_multiply_as_often() -> None:
    macs = {}
    for name, step in list(expert_floor.make_steps(20, 4, torch.float32)[1].items())[4:]:
        with FlopCounterMode(display=False) as counter:
            step()
        macs[name] = counter.get_total_flops() // 2
    forward = 20 * expert_floor.TOP_K * 2 * expert_floor.FEATURES * expert_floor.HIDDEN
    assert list(macs.values()) == [forward, forward, 3 * forward, 3 * forward]


def test_engines_are_compared_with_the_programs_that_users_run(tmp_path: Path) -> None:
    folder = engines.write_images(tmp_path / "images", 9)
    assert len(list(folder.glob("*/*/*.jpg"))) == 9
    commands = engines.programs("local-dir:best", tmp_path / "model.onnx", folder, 32, tmp_path)
    for name, words in commands.items():
        if ".py" in words[1]:
            options = load_tool(Path(words[1]).stem).build_parser().parse_args(words[2:])
            assert options.engine == (str(tmp_path / "model.onnx") if name == engines.ENGINE else None)
            assert (options.batch_size, options.workers) == (32, 2)
    assert {name for pair in engines.AGAINST.items() for name in pair} == commands.keys()


def test_the_ratio_of_engines_is_taken_within_rounds() -> None:
    def costs(*seconds: float) -> list[processes.Cost]:
        return [processes.Cost(one, 2 * one, 0.0) for one in seconds]

    few, many = engines.FEW, 116
    found = {(engines.OURS, few): costs(2, 4), (engines.ENGINE, few): costs(3, 6)}
    found |= {(engines.OURS, many): costs(12, 24), (engines.ENGINE, many): costs(6, 12)}
    (*_, engine) = engines.report(found)
    cells = [cell.strip() for cell in engine.strip("|").split("|")]
    assert cells[0] == engines.ENGINE
    assert cells[1].startswith("9.0 ")
    assert cells[2].startswith("18.0 ")
    assert cells[3].startswith("45.0 ")
    assert cells[4].startswith("0.50 (0.50 to 0.50) of predict.py")
    assert cells[5].startswith("0.30 (0.30 to 0.30) of predict.py")


@pytest.mark.slow
@pytest.mark.parametrize(("against", "count", "evaluations"), [("domainbed", 25, 12), ("timm", 2, 2)])
def test_programs_that_are_compared_are_asked_for_as_much(
    tmp_path: Path, against: str, count: int, evaluations: int
) -> None:
    programs.write_images(tmp_path / "PACS", 5, "jpg")
    args = programs.build_parser().parse_args([against, "PROGRAM", "--variant=--channels-last"])
    made = programs.against_domainbed if against == "domainbed" else programs.against_timm
    theirs, plain, variant = made(args, tmp_path, []).values()
    tool = load_tool("finetune")
    options = [tool.build_parser().parse_args(list(program.words)) for program in (plain, variant)]
    assert [(one.steps, one.eval_freq, one.channels_last) for one in options] == [
        (count, evaluations, False),
        (count, evaluations, True),
    ]
    assert theirs.kind == against
    if against == "timm":  # 28 of 35 images, in one batch of 24 an epoch; the others, and the domain held out
        assert [len(list((tmp_path / "timm" / part).glob("*/*"))) for part in ("train", "validation")] == [28, 42]
        assert theirs.words[theirs.words.index("--epochs") + 1] == "2"


def test_what_a_program_did_is_counted_and_another_amount_refused(capsys: pytest.CaptureFixture[str]) -> None:
    seen, weight = Seen(), torch.nn.Parameter(torch.zeros(3, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.register_step_post_hook(seen.step)
    loss = seen.counted(F.cross_entropy)
    for _ in range(2):
        loss(torch.ones(5, 4) @ weight.T, torch.zeros(5, dtype=torch.long)).backward()
        optimizer.step()
    with torch.no_grad():
        loss(torch.ones(7, 3), torch.zeros(7, dtype=torch.long))
    assert [len(list(seen.passed([(None, [0, 1])]))), seen.timed(len)([])] == [1, 0]
    assert (len(seen.steps), seen.trained, seen.evaluated, seen.parameters) == (2, 10, 9, 12)
    assert len(seen.evaluations) == 1
    run = {**dict.fromkeys(programs.PARTS, 1.0), "count": 2, "trained": 10, "evaluated": 9, "parameters": 12}
    programs.show({"a": [run], "b": [{**run, "whole": 0.5, "evaluated": 3}]})
    assert "| b | 0.5 |" in (said := capsys.readouterr().out)
    assert "0.50 (0.50-0.50)" in said
    with pytest.raises(SystemExit, match="did not do the same"):
        programs.show({"a": [run], "b": [{**run, "trained": 9}]})


def test_time_of_an_inner_part_is_the_inner_one_s_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = short_run.Clock(100.0)
    now = iter((103.0, 104.0, 109.0, 111.0))  # start-up 3; steps 1, evaluation 5 within, steps 2
    monkeypatch.setattr(short_run.time, "monotonic", lambda: next(now))
    with clock.part("steps"), clock.part("evaluation"):
        pass
    wall = {name: seconds for name, (seconds, _) in clock.parts.items() if seconds}
    assert wall == {"start-up": 3.0, "steps": 3.0, "evaluation": 5.0}


def test_seconds_of_steps_are_those_between_records(tmp_path: Path) -> None:
    rows = [{"step": 0, "step_time": 2.0}, {"step": 10, "step_time": 0.5}, {"step": 19, "step_time": 1.0}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert short_run.seconds_in_steps(tmp_path / "results.jsonl") == 2.0 + 10 * 0.5 + 9 * 1.0


@pytest.mark.slow
def test_parts_of_a_short_run_add_up() -> None:
    seconds = short_run.one_run(short_run.HERE, steps=2, launch=False)
    for kind in (0, 1):
        parts = [seconds[name][kind] for name in short_run.PARTS]
        assert min(parts) >= 0
        assert sum(parts) <= seconds["all"][kind] + 0.1  # processor time of workers is beside them
    assert sum(seconds[name][0] for name in short_run.PARTS) == pytest.approx(seconds["all"][0], abs=0.1)
    assert all(seconds[name][1] > 0 for name in ("start-up", "data", "network", "steps", "evaluation", "records"))
