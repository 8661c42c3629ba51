"""The loop of a run on a network of one block: the order of its parts, stopping and resuming, what is measured."""

import math
import shutil
import signal
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from accelerate.utils import set_seed

from tests.finetuning.plans import image_folder
from tests.load_tool import load_tool
from tests.saved_run import outcome
from timm_moe_dg.algorithms import ALGORITHMS, ERM, Averaging, get_averaging
from timm_moe_dg.algorithms.averaging import frozen_copy
from timm_moe_dg.data import EvaluationImages, Split, evaluation_loader, evaluation_transform, seed_hash
from timm_moe_dg.finetuning import loop
from timm_moe_dg.finetuning import plan as plan_module
from timm_moe_dg.finetuning.messages import describe
from timm_moe_dg.finetuning.model import build_model
from timm_moe_dg.finetuning.plan import make_plan
from timm_moe_dg.finetuning.processes import Interruption, join_processes, process_state_kept
from timm_moe_dg.finetuning.resume import find_resume_point, parse_resumable
from timm_moe_dg.finetuning.run import FineTuning, start
from timm_moe_dg.networks.build import data_config
from timm_moe_dg.networks.trained import load_trained
from timm_moe_dg.protocols.evaluation import domain_accuracies, predict
from timm_moe_dg.protocols.options import run_parser
from timm_moe_dg.protocols.records import read_records
from timm_moe_dg.protocols.selection import training_domain_validation
from timm_moe_dg.storage.run_folder import RunFolder

IMAGES = {"art": 10, "photo": 20, "sketch": 30}
CLASSES = ("cat", "dog", "owl")
SIZE = ["--model-kwargs", "patch_size=8", "embed_dim=8", "depth=1", "num_heads=1", "drop_rate=0.5"]
MODEL = ["--model", "deit_tiny_patch16_224", "--img-size", "16", *SIZE]
STEPS = ["--steps", "5", "--eval-freq", "2", "--batch-size", "2", "--lr", "0.1", "--sched", "cosine"]
RUN = [*MODEL, *STEPS, "--test-domains", "photo", "--eval-train", "--workers", "0", "--cpu-threads", "1"]
RUN += ["--save-rules", "oracle"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    labels = [CLASSES[label] for label in (0, 1, 1, 2, 2, 2)]  # no two classes have the same share
    files = (f"{domain}/{labels[index % 6]}/{index}.png" for domain in IMAGES for index in range(IMAGES[domain]))
    image_folder(root, *files, side=16)
    return root


@pytest.fixture(scope="module")
def finetune(images):
    """Runs the tool, and returns the plan of the run."""
    tool, plans = load_tool("finetune"), []
    make_plan = loop.make_plan

    def run(output, *words):
        data = ["--dataset", "folder", "--data-dir", str(images), "--output", str(output), "--experiment", "a"]
        tool.main([*RUN, *data, *map(str, words)])
        return plans[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "plot_learning_curves", lambda *_: None)  # slow, and of no interest here
        patch.setattr(loop, "make_plan", lambda options: plans.append(make_plan(options)) or plans[-1])
        yield run


def answer(network, label):
    """Makes a network answer with one class whatever the image."""
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.bias.copy_(50.0 * torch.eye(len(CLASSES))[label])
    return network


class Recorder(Averaging):
    """Stands for the network while it is trained, and for the run at its end, by other answers than the network's."""

    def __init__(self, network, hparams):
        super().__init__(network, hparams)
        answer(network, 0)
        self.averages = {"during": answer(frozen_copy(network), 1), "final": answer(frozen_copy(network), 2)}
        self.events, self.used = [], ("during", "final")

    def update(self, network, step):
        self.events.append(("average", step))

    def evaluated(self, step, validation_loss):
        self.events.append(("judge", step, validation_loss))

    def during(self):
        return self.averages["during"] if "during" in self.used else None

    def final(self):
        return self.averages["final"] if "final" in self.used else None


class Noting:
    """Stands for a part of a run: does what the part does, and notes the calls of some of its methods."""

    def __init__(self, part, events, **notes):
        self._part, self._events, self._notes = part, events, notes

    def __getattr__(self, name):
        method = getattr(self._part, name)
        if name not in self._notes:
            return method

        def noted(*args, **options):
            result = method(*args, **options)
            self._events.append(self._notes[name](result, *args))
            return result

        return noted


class NotingFolder(Noting):
    """A run folder that notes its records and checkpoints."""

    def __init__(self, folder, events):
        super().__init__(
            folder,
            events,
            add=lambda _, record, __: ("record", record.step, record.averaged),
            finish=lambda _: ("finish",),
        )
        self.checkpoints = Noting(folder.checkpoints, events, save=lambda _, step, __: ("checkpoint", step))


def note_step(losses, context, _):
    return "step", context.optimizer.param_groups[0]["lr"], torch.initial_seed(), losses["loss"].item()


def noted_run(images, output, *words, used=("during", "final")):
    """Takes a whole run with parts that note their calls, and returns its plan and the calls in their order."""
    data = ["--dataset", "folder", "--data-dir", str(images), "--output", str(output), "--experiment", "a"]
    plan, events = make_plan(parse_resumable(run_parser(), [*RUN, *data, *words])), []
    with process_state_kept(output), Interruption() as stop:
        accelerator = join_processes(plan.options)
        set_seed(plan.options.seed)
        model = build_model(plan, accelerator)
        average = Recorder(model.network, {})
        average.events, average.used = events, used
        parts = {"averaging": average, "algorithm": Noting(model.algorithm, events, take_step=note_step)}
        point = find_resume_point(plan, accelerator)
        noted_plan = replace(plan, folder=NotingFolder(plan.folder, events))
        run = start(noted_plan, accelerator, replace(model, **parts), point)
        loop.train(run, stop)
        loop.finish(run, stop)
    return plan, events


def test_parts_of_a_step_come_in_order_with_its_number_rate_and_seed(images, tmp_path):
    plan, events = noted_run(images, tmp_path, "--warmup-steps", "2", "--save-freq", "3", "--steps", "6")
    rates = [0.0, 0.05, *(0.1 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4))]
    records = {record.step: record for record in read_records(tmp_path / "a" / "results.jsonl") if not record.averaged}
    losses = iter([event[-1] for event in events if event[0] == "step"])
    expected, since = [], []
    for step, rate in enumerate(rates):
        since.append(next(losses))
        seed = seed_hash(plan.options.seed, step, 0)
        expected += [("step", pytest.approx(rate), seed, since[-1]), ("average", step)]
        if step:  # the folder appears with the first evaluation
            expected += [("checkpoint", step)] if step in (2, 3, 4, 5) else []
        if step in (0, 2, 4, 5):
            loss = fmean(records[step].out_loss[position] for position in (0, 2))  # the training domains
            expected += [("record", step, False), ("judge", step, pytest.approx(loss))]
            assert loss != pytest.approx(fmean(records[step].out_loss))
            assert records[step].losses["loss"] == pytest.approx(fmean(since))
            since = []
    assert events == [*expected, ("record", 5, True), ("finish",)]


@pytest.mark.parametrize("words", [[], ["--skip-unreadable"]])
def test_a_dry_run_warns_of_copies_of_training_images(images, tmp_path, caplog, words):
    shutil.copytree(images, tmp_path / "data")
    shutil.copy(tmp_path / "data" / "art" / "cat" / "0.png", tmp_path / "data" / "photo" / "owl")
    run = ["--dataset", "folder", "--data-dir", str(tmp_path / "data"), "--output", str(tmp_path), *RUN]
    loop.finetune(parse_resumable(run_parser(), [*run, "--dry-run", *words]), None)
    assert "copies of training images, such as" in caplog.text


def test_epochs_are_passes_over_the_smallest_training_domain_wherever_they_are_named(finetune, tmp_path):
    plan = finetune(tmp_path, "--test-domains", "art")
    assert [len(split.inside) for split in plan.splits] == [8, 16, 24]
    assert plan.training == [1, 2]
    records = read_records(tmp_path / "a" / "results.jsonl")
    assert [record.epoch for record in records] == [0, 2 * 2 / 16, 4 * 2 / 16]
    assert f"{16 / 2:.1f} steps are an epoch, one pass over" in describe(plan)
    assert f"{5 * 2 / 16:.1f} epochs in all" in describe(plan)


@pytest.mark.parametrize("used", [[], ["during"], ["during", "final"]], ids=str)
def test_what_is_measured_is_saved_and_has_the_accuracy_when_it_is_loaded(images, tmp_path, used):
    plan, _ = noted_run(images, tmp_path, used=used)
    label = len(used)
    shares = [np.mean([domain.targets[index] == label for index in split.inside])
              for domain, split in zip(plan.domains, plan.splits, strict=True)]  # fmt: skip
    record = read_records(tmp_path / "a" / "results.jsonl")[-1]
    assert record.averaged == ("final" in used)
    assert record.in_acc == pytest.approx(shares)
    assert reloaded_accuracies(tmp_path / "a" / "best", plan) == (record.in_acc, record.out_acc)


def reloaded_accuracies(folder, plan):
    network = load_trained(f"local-dir:{folder}", img_size=16)
    config = data_config(network, 16)
    images = EvaluationImages(plan.domains, plan.splits, evaluation_transform((16, 16), config["mean"], config["std"]))
    return domain_accuracies(predict(network, evaluation_loader(images, batch_size=64, workers=0)), len(plan.domains))


# The loss rises from the first evaluation on, so that the average is over all steps after it
SWAD = ["--averaging", "swad", "--hparams", '{"swad_n_converge": 2, "swad_tolerance_ratio": 1e6}']
SWAD += ["--lr", "1", "--warmup-steps", "1"]


@pytest.fixture(scope="module")
def whole(finetune, tmp_path_factory):
    """The outcome of a run that nothing disturbed."""
    output = tmp_path_factory.mktemp("whole")
    finetune(output, *SWAD)
    records = read_records(output / "a" / "results.jsonl")[:-1]
    losses = [record.out_loss[0] + record.out_loss[2] for record in records]
    assert losses[0] == min(losses)
    return outcome(output / "a")


def interrupt():
    raise KeyboardInterrupt


PLACES = {
    "told to end in step 3": (ERM, "update", 3, lambda: signal.raise_signal(signal.SIGTERM), [2, 3]),
    "told to end in the evaluation of step 2": (
        FineTuning, "evaluate", 1, lambda: signal.raise_signal(signal.SIGTERM), [2],
    ),
    "killed after the evaluation of step 2": (ERM, "update", 3, interrupt, [2]),
    "killed at the end": (RunFolder, "finish", 0, interrupt, [2, 4]),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(finetune, whole, tmp_path, monkeypatch, place):
    owner, name, number, action, checkpoints = PLACES[place]
    method, calls = getattr(owner, name), iter(range(100))

    def stopping(self, *args, **options):
        if next(calls) == number:
            action()
        return method(self, *args, **options)

    monkeypatch.setattr(owner, name, stopping)
    with pytest.raises(SystemExit) as caught:
        finetune(tmp_path, *SWAD)
    assert caught.value.code == (130 if action is interrupt else 143)
    saved = sorted(int(path.stem.removeprefix("step-")) for path in (tmp_path / "a" / "checkpoints").glob("*.pt"))
    assert saved == checkpoints
    finetune(tmp_path, *SWAD, "--resume", "auto")
    assert outcome(tmp_path / "a") == whole


STATES = [
    ("VREx", ["--hparams", '{"vrex_penalty_anneal_iters": 4}']),  # a new optimizer on the far side of the stop
    ("DANN", ["--hparams", '{"mlp_width": 8}']),  # layers with moments of their own
    ("ERM", ["--linear-steps", "4", "--linear-lr", "0.02", "--opt", "adam"]),  # the switch on the far side
]


@pytest.mark.slow  # three runs each
@pytest.mark.parametrize(("name", "words"), STATES)
def test_a_stopped_run_goes_on_to_the_same_bits_whatever_its_method_carries_along(
    finetune, tmp_path, monkeypatch, name, words
):
    method, words = ALGORITHMS[name], ["--algorithm", name, *words, "--lr", "0.01", "--resume", "auto"]
    finetune(tmp_path / "alone", *words)
    update, taken = method.update, []

    def stopping(self, context, minibatches):
        taken.append(1)
        if len(taken) == 4:
            signal.raise_signal(signal.SIGTERM)
        return update(self, context, minibatches)

    monkeypatch.setattr(method, "update", stopping)
    with pytest.raises(SystemExit):
        finetune(tmp_path / "stopped", *words)
    assert len(taken) == 4
    finetune(tmp_path / "stopped", *words)
    assert len(taken) == 5  # it went on, and did not start afresh
    assert outcome(tmp_path / "stopped" / "a") == outcome(tmp_path / "alone" / "a")


def without_validation(monkeypatch, emptied):
    """Takes the validation images from some domains, as an official split may do."""
    make_splits = plan_module.make_splits

    def make(*args, **options):
        splits = make_splits(*args, **options)
        return [Split(s.inside, s.outside[:0] if index in emptied else s.outside) for index, s in enumerate(splits)]

    monkeypatch.setattr(plan_module, "make_splits", make)


@pytest.mark.parametrize("averaging", ["swad", "swad_released"])
def test_a_training_domain_without_validation_images_does_not_count(finetune, tmp_path, monkeypatch, averaging):
    without_validation(monkeypatch, [0])
    losses = []
    monkeypatch.setattr(get_averaging(averaging), "search", lambda self, step, loss: losses.append(loss))
    finetune(tmp_path, "--averaging", averaging, "--early-stop", "9")
    records = read_records(tmp_path / "a" / "results.jsonl")
    assert math.isnan(records[0].out_loss[0])
    assert losses == [record.out_loss[2] for record in records]


def test_without_any_validation_image_the_last_network_is_kept_and_options_that_compare_are_refused(
    finetune, tmp_path, monkeypatch
):
    without_validation(monkeypatch, [0, 2])
    for words in (["--averaging", "swad"], ["--averaging", "swad_released"], ["--early-stop", "1"]):
        with pytest.raises(SystemExit, match=f"{words[0][2:].replace('-', '_')}=.*no training domain has any"):
            finetune(tmp_path, *words)
    assert not (tmp_path / "a").exists()
    finetune(tmp_path)
    records = read_records(tmp_path / "a" / "results.jsonl")
    assert training_domain_validation(records).step == records[-1].step == 4


def test_a_run_that_gets_no_better_ends_early_and_does_not_go_on(finetune, tmp_path, monkeypatch, capsys):
    words = ["--lr", "0", "--eval-freq", "1", "--early-stop", "2", "--steps", "50"]
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", lambda *_, **__: interrupt())
        with pytest.raises(SystemExit):
            finetune(tmp_path, *words)
    assert "ending after step 2: 2 evaluations without a better validation" in capsys.readouterr().out
    finetune(tmp_path, *words, "--resume", "auto")
    assert [record.step for record in read_records(tmp_path / "a" / "results.jsonl")] == [0, 1, 2]
    assert (tmp_path / "a" / "done").exists()


def nan_loss(network, losses):
    return {**losses, "loss": losses["loss"] * math.nan}


def weights_of(value):
    def change(network, losses):
        with torch.no_grad():
            network.head.bias.fill_(value)
        return losses

    return change


@pytest.mark.parametrize(
    ("change", "step", "message"),
    [
        (nan_loss, 1, "DivergenceError: loss=nan: not finite by step 1, on a batch of art, sketch;"),
        (nan_loss, 2, "DivergenceError: loss=nan: not finite by step 2,"),
        (weights_of(math.nan), 2, "DivergenceError: weights=inf: too large after step 2"),
        (weights_of(-1e10), 2, r"DivergenceError: weights=1.0e\+10: too large after step 2"),
    ],
)
def test_a_step_that_diverged_is_named_and_not_kept(finetune, tmp_path, monkeypatch, change, step, message):
    update, steps = ERM.update, iter(range(100))

    def diverging(self, context, minibatches):
        losses = update(self, context, minibatches)
        return change(context.model, losses) if next(steps) == step else losses

    monkeypatch.setattr(ERM, "update", diverging)
    with pytest.raises(SystemExit, match=message):
        finetune(tmp_path)
    assert [record.step for record in read_records(tmp_path / "a" / "results.jsonl")] == [0]
    assert not (tmp_path / "a" / "checkpoints").exists()
