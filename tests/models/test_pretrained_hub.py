"""`pretrained=True` through timm's builder and the Hub's own client: from an offline cache, and over HTTP."""

import pytest
import safetensors.torch
import torch
from timm.models import save_for_hf

from tests.hub_cache import fill_cache
from tests.hub_server import serve
from tests.models.backbones import BACKBONES
from tests.models.cases import BY_NAME, CASES, randomize
from tests.models.hub_client import ask, small_request

pytestmark = pytest.mark.slow  # whole runs, programs and processes

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def dense_models():
    """One small dense model for each Hub repository that a registered model is upcycled from."""
    sources = {case.dense: case for case in CASES}
    models = {}
    for seed, (source, case) in enumerate(sources.items()):
        torch.manual_seed(seed)
        models[source] = randomize(case.small_dense(num_classes=1000), seed=seed).eval()
    return models


@pytest.fixture(scope="module")
def offline_cache(dense_models, tmp_path_factory):
    """The folder that the Hub's client would have left behind after downloading every source."""
    cache = tmp_path_factory.mktemp("hub")
    for source, model in dense_models.items():
        fill_cache(cache, f"timm/{source}", model.state_dict())
    return cache


@pytest.fixture(scope="module")
def offline_answers(offline_cache):
    """What each model computes after loading from the cache: with the source's classes, and with 7 of its own."""
    requests = [small_request(case.name, num_classes=classes) for classes in (1000, 7) for case in CASES]
    answers = ask(requests, offline_cache, HF_HUB_OFFLINE="1")
    names = [(request["case"], request["options"]["num_classes"]) for request in requests]
    return dict(zip(names, answers, strict=True))


@torch.no_grad()
def expected(case, dense_models):
    dense = dense_models[case.dense]
    tokens = dense.forward_features(case.images())
    return dense.forward_head(tokens, pre_logits=True), dense.forward_head(tokens)


def test_from_the_cache_every_model_computes_what_its_dense_source_computes(registered, dense_models, offline_answers):
    features, logits = expected(registered, dense_models)
    same, other = (offline_answers[registered.name, classes] for classes in (1000, 7))
    torch.testing.assert_close(torch.tensor(same["logits"]), logits, rtol=0, atol=TOLERANCE)
    # With other classes only the classifier is new
    torch.testing.assert_close(torch.tensor(other["features"]), features, rtol=0, atol=TOLERANCE)
    assert torch.tensor(other["logits"]).shape == (3, 7)
    line = f"Upcycled from timm/{registered.dense}: 12 experts filled in 2 mixture layers."
    assert same["log"] == other["log"] == [line]


def test_without_the_source_there_is_an_error_and_no_random_model(tmp_path):
    (answer,) = ask([small_request("gmoe_tiny_patch16")], tmp_path, HF_HUB_OFFLINE="1")
    assert "LocalEntryNotFoundError" in answer["error"]


@pytest.fixture(scope="module")
def http_session(dense_models, tmp_path_factory):
    """A dense source, an incomplete copy of it, and a trained mixture, served over HTTP; the client's answers."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("dense", "trained", "upcycled", "broken", "cache")}
    source = BY_NAME["gmoe_tiny_patch16"].dense
    weights = dense_models[source].state_dict()
    safetensors.torch.save_file(weights, folders["dense"] / "model.safetensors")
    incomplete = {key: value for key, value in weights.items() if key != "blocks.1.mlp.fc1.weight"}
    safetensors.torch.save_file(incomplete, folders["broken"] / "model.safetensors")
    torch.manual_seed(0)
    trained = randomize(BY_NAME["moge_tiny"].small(num_classes=5, moe_layers=[1, 3], num_experts=4)).eval()
    save_for_hf(trained, folders["trained"], safe_serialization=True)
    upcycled = randomize(BACKBONES["Mlp"].mixture()).eval()
    save_for_hf(upcycled, folders["upcycled"], safe_serialization=True)
    repositories = {
        f"timm/{source}": folders["dense"],
        f"timm/{BY_NAME['sfmoe_small'].dense}": folders["broken"],
        "someone/moge": folders["trained"],
        "someone/upcycled": folders["upcycled"],
    }
    requests = [
        small_request("gmoe_tiny_patch16"),
        {"case": "moge_tiny", "model": "hf-hub:someone/moge", "options": {}},
        {"case": "gmoe_tiny_patch16", "model": "hf-hub:someone/upcycled", "options": {}},
        small_request("sfmoe_small", num_classes=7),
    ]
    with serve(repositories) as hub:
        answers = ask(requests, folders["cache"], HF_ENDPOINT=hub.endpoint, HF_HUB_DISABLE_XET="1")
    return answers, hub.requests, (trained, upcycled)


def test_over_http_the_dense_source_is_downloaded_and_upcycled(http_session, dense_models):
    (answer, *_), requests, _ = http_session
    case = BY_NAME["gmoe_tiny_patch16"]
    _, logits = expected(case, dense_models)
    torch.testing.assert_close(torch.tensor(answer["logits"]), logits, rtol=0, atol=TOLERANCE)
    address = f"/timm/{case.dense}/resolve/main/model.safetensors"
    assert requests[0] == f"HEAD {address}"
    assert any(request.startswith(f"GET /timm/{case.dense}/resolve/") for request in requests)


@torch.no_grad()
def test_over_http_a_trained_mixture_comes_back_bit_by_bit(http_session):
    (_, answer, upcycled_answer, _), _, (trained, upcycled) = http_session
    images = BY_NAME["moge_tiny"].images()
    assert torch.equal(torch.tensor(answer["logits"]), trained(images))
    assert torch.equal(torch.tensor(upcycled_answer["logits"]), upcycled(images))
    assert answer["log"] == ["Loaded a mixture-of-experts checkpoint from someone/moge: no expert upcycled."]


def test_over_http_an_incomplete_source_is_refused_although_the_classes_differ(http_session):
    (*_, answer), _, _ = http_session
    assert answer["error"].startswith("CheckpointError")
    assert "missing from the checkpoint (1): blocks.1.mlp.fc1.weight" in answer["error"]
