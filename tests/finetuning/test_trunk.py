"""Frozen trunks whose outputs are kept: the same steps and scores as from images, whole networks, safe files."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import distributed

import timm_moe_dg
from tests.data.files import read_few
from tests.finetuning.plans import plan_of
from tests.load_tool import load_tool
from tests.quick_python import run_ranks
from timm_moe_dg.data import Benchmark
from timm_moe_dg.data.transforms import AUGMENTATIONS
from timm_moe_dg.errors import ArgumentError, StorageError
from timm_moe_dg.finetuning import trunk_cache
from timm_moe_dg.finetuning.loop import take_step
from timm_moe_dg.finetuning.model import Model, build_model
from timm_moe_dg.finetuning.processes import process_state_kept
from timm_moe_dg.finetuning.resume import ResumePoint
from timm_moe_dg.finetuning.run import start
from timm_moe_dg.protocols.evaluation import predict
from timm_moe_dg.protocols.records import read_records
from timm_moe_dg.protocols.selection import training_domain_validation

SIZE = ("embed_dim=24", "depth=4", "num_heads=3")
VIT = ("--model", "deit_tiny_patch16_224", "--model-kwargs", *SIZE, "patch_size=8", "drop_rate=0.1")
GMOE = ("--model", "gmoe_tiny_patch16", "--model-kwargs", *SIZE, "patch_size=8", "moe_layers=(2,)")
MOGE = ("--model", "moge_tiny", "--model-kwargs", *SIZE, "patch_size=8", "moe_layers=(2,)", "--dataset", "geo_digits")
D3G = ("--model", "d3g_tiny_patch16", "--model-kwargs", *SIZE, "patch_size=8", "--dataset", "geo_digits")
DINO = ("--model", "gmoe", "--model-kwargs", "backbone=vit_small_patch16_dinov3", *SIZE, "moe_layers=(2,)")
QUICK = ("-b", "4", "--workers", "0", "--img-size", "32", "--eval-train", "--steps", "7", "--checkpoint-freq", "3")
TRUNK, CACHED = ("--freeze", "trunk"), ("--cache-trunk", "float32")


READ = Benchmark.read


@pytest.fixture(scope="module", autouse=True)
def few_images_without_augmentation():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AUGMENTATIONS, "digit", AUGMENTATIONS["none"])
        read_few(patch, 10)
        yield


def build(tmp_path: Path, *words: str) -> Model:
    with process_state_kept(tmp_path):
        return build_model(plan_of(tmp_path, *QUICK, *words), Accelerator(cpu=True))


def cache_files(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("output/trunk-cache/[!.]*"))


def take_steps(tmp_path: Path, *words: str, steps: int = 3) -> tuple[list[float], Any]:
    """Returns the losses of some steps, and predictions of all images afterwards."""
    with process_state_kept(tmp_path):
        plan, accelerator = plan_of(tmp_path, *QUICK, *words), Accelerator(cpu=True)
        set_seed(0)
        run = start(plan, accelerator, build_model(plan, accelerator), ResumePoint({}, None, 0))
        losses = []
        for step, minibatches in zip(range(steps), run.batches, strict=False):
            set_seed(step)
            losses += [value.item() for value in take_step(run, step, minibatches).values()]
            if run.model.averaging:
                run.model.averaging.update(run.model.network, step)
        average = run.model.averaging.during() if run.model.averaging else None
        return losses, predict(average or run.model.network, run.evaluation)


@pytest.mark.parametrize(
    "words",
    [
        (*GMOE, *TRUNK),
        (*GMOE, *TRUNK, "--algorithm", "MIRO", "--grad-checkpointing"),
        (*GMOE, "--freeze", "trunk:1", "--algorithm", "CORAL", "--averaging", "ema"),
        (*GMOE, "--freeze", "backbone"),
        (*DINO, *TRUNK),
        (*MOGE, *TRUNK),
        (*D3G, "--freeze", "trunk:3", "--layer-decay", "0.7"),
        (*VIT, "--freeze", "trunk:3", "--algorithm", "DANN", "--drop-path", "0.3"),
        (*VIT, "--freeze", "backbone", "--algorithm", "Fish", "--class-balanced"),
    ],
    ids=lambda words: "-".join((words[1], *words[words.index("--freeze") + 1 :])),
)
def test_steps_and_scores_are_those_of_a_frozen_trunk_without_a_file(words, tmp_path):
    losses, scores = take_steps(tmp_path, *words)
    cached_losses, cached_scores = take_steps(tmp_path, *words, *CACHED)
    assert len(cache_files(tmp_path)) == 1
    assert cached_losses == pytest.approx(losses, abs=1e-5)
    assert len(set(losses)) > 3
    for column, cached in zip(scores, cached_scores, strict=True):
        torch.testing.assert_close(cached, column, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_half_precision_gives_the_same_accuracy(tmp_path, monkeypatch):
    monkeypatch.setattr(Benchmark, "read", READ)  # of all images
    words = (*VIT, "--freeze", "trunk:3", "--lr", "1e-3", "-b", "16")
    runs = [take_steps(tmp_path, *words, *cached, steps=60) for cached in ((), ("--cache-trunk",))]
    plain, cached = [(scores.predicted == scores.target).double().mean().item() for _, scores in runs]
    assert cached == pytest.approx(plain, abs=0.003)
    assert plain > 0.14


def test_a_run_saves_the_whole_network_and_resumes_to_the_same_numbers(tmp_path):
    sizes = {"embed_dim": 24, "depth": 4, "num_heads": 3, "patch_size": 8, "moe_layers": (2,)}
    options = {"model": "gmoe_tiny_patch16", "model_kwargs": sizes, "img_size": 32, "freeze": "trunk", "lr": 3e-3}
    options |= {"batch_size": 8, "workers": 0, "eval_train": True, "output": tmp_path, "cache_trunk": "float32"}
    whole = timm_moe_dg.finetune(**options, steps=9, eval_freq=4, experiment="whole")
    begun = timm_moe_dg.finetune(**options, steps=5, eval_freq=4, experiment="begun")
    timm_moe_dg.finetune(resume=begun.path, steps=9)
    records, resumed = (read_records(run.path / "results.jsonl") for run in (whole, begun))
    assert [record.losses for record in resumed] == [record.losses for record in records]
    assert [record.out_loss for record in resumed] == [record.out_loss for record in records]
    scores = timm_moe_dg.evaluate(whole, workers=0)  # from images
    assert scores.in_accuracy.tolist() == pytest.approx(list(training_domain_validation(records).in_acc), abs=1e-6)


def test_networks_with_one_trunk_share_a_file_and_everything_else_has_its_own(tmp_path):
    common = ("--dataset", "geo_digits", "--freeze", "trunk:2", "--cache-trunk")
    weights = tmp_path / "dense.pt"
    torch.manual_seed(0)
    torch.save(build(tmp_path, *VIT).network.state_dict(), weights)
    start = ("--initial-checkpoint", str(weights), "--num-classes", "10")
    for model in (VIT, GMOE, MOGE):
        build(tmp_path, *model, *start, *common, "--trial-seed", "1")
    (shared,) = cache_files(tmp_path)
    content = shared.read_bytes()
    others = (("float32",), ("--mean", "0.4", "0.4", "0.4"), ("--img-size", "16"), ("--freeze", "trunk:1"))
    for count, words in enumerate((*others, ("--dataset", "rotated_digits")), start=2):
        build(tmp_path, *VIT, *start, *common, *words)
        assert len(cache_files(tmp_path)) == count
    torch.manual_seed(1)
    build(tmp_path, *VIT, *common)  # other weights
    assert len(cache_files(tmp_path)) == count + 1

    for damaged in (content[:-4], content[:99] + bytes([content[99] ^ 1]) + content[100:]):
        shared.write_bytes(damaged)
        tokens = build(tmp_path, *GMOE, *start, *common).tokens
        assert shared.read_bytes() == content
    assert tokens.shape == (sum(map(len, plan_of(tmp_path, *common).domains)), 17, 24)


def test_a_full_disk_leaves_no_file_and_no_run(tmp_path, monkeypatch):
    words = (*GMOE, *TRUNK, "--cache-trunk")
    monkeypatch.setattr(trunk_cache.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(ArgumentError, match=r"cache_trunk='float16': .*trunk-cache needs 0 MB and has 0 MB; free some"):
        build(tmp_path, *words)
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    outputs = trunk_cache._outputs
    monkeypatch.setattr(trunk_cache, "_outputs", lambda *given: outputs(*given) if len(given[1]) == 1 else full())
    with pytest.raises(StorageError, match=r"No space left on device.*: free some space"):
        build(tmp_path, *words)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (CACHED, "cache_trunk='float32': keeps the outputs of frozen blocks; add --freeze trunk"),
        ((*CACHED, "--freeze", "routers"), "cache_trunk="),
        ((*TRUNK, *CACHED, "--aa", "rand-m9"), "aa='rand-m9': needs pixels, and --cache-trunk"),
        ((*TRUNK, *CACHED, "--reprob", "0.1"), "reprob=0.1: needs pixels"),
        ((*TRUNK, *CACHED, "--val-augment"), "val_augment=True: needs pixels"),
        ((*TRUNK, *CACHED, "--algorithm", "Mixup"), "algorithm='Mixup': needs pixels"),
        ((*TRUNK, "--model", "resnet10t"), "freeze='trunk': ResNet is no vision transformer"),
        (("--freeze", "backbone", *CACHED, "--model", "resnet10t"), "freeze='backbone': ResNet is no vision"),
        ((*VIT, *TRUNK), "freeze='trunk': VisionTransformer has no mixtures; give trunk:N, with N of 4 blocks"),
        ((*VIT, "--freeze", "trunk:5"), "freeze='trunk:5': 4 of 4 blocks lie below"),
        ((*GMOE, "--freeze", "trunk:3"), "freeze='trunk:3': 2 of 4 blocks lie below the first mixture"),
    ],
)
def test_settings_without_a_meaning_are_refused_by_name(words, message, tmp_path):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        build(tmp_path, *words, "--dry-run")


def work(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29679", "ACCELERATE_USE_CPU": "true"}
    distributed.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AUGMENTATIONS, "digit", AUGMENTATIONS["none"])
        read_few(patch, 10)
        for name, words in {"plain": (), "cached": CACHED}.items():
            load_tool("finetune").main([*GMOE, *TRUNK, *QUICK, *words, "--output", folder, "--experiment", name])
    distributed.destroy_process_group()


@pytest.mark.slow  # processes
def test_two_processes_share_a_file(tmp_path, fresh_python):
    run_ranks(fresh_python, work, str(tmp_path / "output"))
    plain, cached = (read_records(tmp_path / "output" / name / "results.jsonl") for name in ("plain", "cached"))
    for one, other in zip(plain, cached, strict=True):
        assert other.losses == pytest.approx(one.losses, abs=1e-5)
    assert len(cache_files(tmp_path)) == 1
