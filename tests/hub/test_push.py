"""Uploads: in one commit, repeatable, and refused before anything is changed."""

import shutil
from unittest.mock import Mock

import pytest
from huggingface_hub import HfApi, constants

from tests.hub.published import CARDS, REPOSITORY, fine_tuned, write_run
from tests.hub_server import TOKEN
from timm_moe_dg.errors import ArgumentError, HubError
from timm_moe_dg.hub.card import write_card
from timm_moe_dg.hub.folder import Origin, fill_from_network, load_folder
from timm_moe_dg.hub.push import push_folder


def prepared(folder, network=None, repo_id=REPOSITORY):
    fill_from_network(folder, fine_tuned() if network is None else network)
    write_card(folder, load_folder(folder), repo_id, Origin("random initialization"), CARDS)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("folder"))


@pytest.fixture
def copy(folder, tmp_path):
    """A copy of the folder, to be changed."""
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


def test_everything_arrives_in_one_commit_and_a_second_upload_sends_nothing(hub, folder):
    first = push_folder(folder, REPOSITORY)
    assert hub.commits(REPOSITORY) == ["Add gmoe_tiny_patch16"]
    files = hub.repositories[REPOSITORY].at("main").files
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(files) == {"README.md", "config.json", "model.safetensors"}
    assert push_folder(folder, REPOSITORY).oid == first.oid
    assert len(hub.commits(REPOSITORY)) == 1


def test_the_page_of_a_model_arrives_in_a_space_of_the_same_name(hub, tool, tmp_path, capfd):
    words = [str(write_run(tmp_path / "run")), "--repo-id", REPOSITORY, "--output", str(tmp_path), "--with-space"]
    tool.main(words)
    files = hub.repositories[f"space:{REPOSITORY}"].at("main").files
    written = tmp_path / "hub" / "someone--network--space"
    assert files == {path.name: path.read_bytes() for path in written.iterdir()}
    assert hub.commits(REPOSITORY) == ["Add gmoe_tiny_patch16"]
    printed = capfd.readouterr().out
    assert f"published: {hub.endpoint}/{REPOSITORY}/commit/" in printed
    assert TOKEN not in printed
    assert f"space: {hub.endpoint}/spaces/{REPOSITORY}/commit/" in printed
    tool.main(words)  # nothing is sent twice
    assert hub.commits(f"space:{REPOSITORY}") == ["Add the page of the model"]


@pytest.mark.usefixtures("hub")
def test_files_that_an_earlier_upload_left_are_named(folder, copy, caplog):
    (copy / "report.html").write_text("of the network before")
    push_folder(copy, REPOSITORY)
    assert not caplog.messages
    push_folder(folder, REPOSITORY)
    assert f"repo_id='{REPOSITORY}': keeps report.html, perhaps of another network" in caplog.text


def test_an_upload_that_cannot_be_finished_commits_nothing_and_can_be_repeated(hub, folder):
    hub.drop = lambda request: "/commit/" in request
    with pytest.raises(HubError, match=r"nothing was committed.*someone/network is new and empty\. Repeat"):
        push_folder(folder, REPOSITORY)
    assert hub.repositories[REPOSITORY].at("main").files == {}
    with pytest.raises(HubError, match=r"someone/network is unchanged"):
        push_folder(folder, REPOSITORY)
    hub.drop = lambda request: False
    push_folder(folder, REPOSITORY)
    assert len(hub.repositories[REPOSITORY].at("main").files) == 3


def test_branches_and_pull_requests_leave_main_alone(hub, folder):
    push_folder(folder, REPOSITORY, revision="try")
    assert (hub.commits(REPOSITORY), len(hub.commits(REPOSITORY, "try"))) == ([], 1)
    commit = push_folder(folder, REPOSITORY, create_pr=True)
    assert commit.pr_url.startswith(f"{hub.endpoint}/{REPOSITORY}/discussions/")
    assert hub.commits(REPOSITORY) == []


def test_a_private_repository_is_private_and_a_public_one_is_not_mistaken_for_it(hub, folder):
    push_folder(folder, REPOSITORY, private=True)
    assert hub.repositories[REPOSITORY].private
    push_folder(folder, REPOSITORY, private=True)
    push_folder(folder, "someone/public")
    with pytest.raises(ArgumentError, match=r"repo_id='someone/public': is public"):
        push_folder(folder, "someone/public", private=True)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"name": "sfmoe_small"}, "architecture gmoe_tiny_patch16, not sfmoe_small"),
        ({"num_classes": 3}, "num_classes 5, not 3"),
    ],
)
def test_another_model_replaces_what_is_there_only_when_told(other, difference, hub, folder, tmp_path):
    push_folder(folder, REPOSITORY)
    second = prepared(tmp_path, fine_tuned(**other))
    with pytest.raises(ArgumentError, match=rf"holds another model \({difference}\); .*--replace-model"):
        push_folder(second, REPOSITORY)
    assert len(hub.commits(REPOSITORY)) == 1
    push_folder(second, REPOSITORY, replace_model=True)
    assert len(hub.commits(REPOSITORY)) == 2


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("create_repo", OSError, "check the connection .*nothing was sent"),
        ("create_branch", OSError, "nothing was committed: someone/network is unchanged"),
    ],
)
def test_a_connection_that_breaks_before_the_upload_changes_nothing(method, error, message, hub, folder, monkeypatch):
    push_folder(folder, REPOSITORY)
    monkeypatch.setattr(HfApi, method, Mock(side_effect=error("the connection broke")))
    with pytest.raises(HubError, match=f"the connection broke; .*{message}"):
        push_folder(folder, REPOSITORY, revision="main")
    assert len(hub.commits(REPOSITORY)) == 1


def test_a_card_that_the_hub_refuses_stops_everything(hub, copy):
    (copy / "README.md").write_text("---\nlicense: own\n---\n# Mine\n")
    with pytest.raises(HubError, match=r'"license" own is not allowed.*nothing was committed'):
        push_folder(copy, REPOSITORY)
    assert hub.commits(REPOSITORY) == []


@pytest.mark.parametrize(
    ("token", "complaint"),
    [
        (None, "set HF_TOKEN .*nothing was sent"),
        ("hf_a_wrong_one", "Invalid user token.*; nothing was sent"),
    ],
)
def test_without_a_token_that_works_nothing_is_sent(token, complaint, hub, folder, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match=complaint) as caught:
        push_folder(folder, REPOSITORY)
    assert not token or token not in str(caught.value)
    assert hub.repositories == {}


@pytest.mark.usefixtures("hub")
def test_without_a_connection_the_error_says_where_it_tried(folder, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"ConnectError.*check the connection to http://127\.0\.0\.1:9; nothing"):
        push_folder(folder, REPOSITORY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="OfflineModeIsEnabled"):
        push_folder(folder, REPOSITORY)
