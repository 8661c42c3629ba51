"""Uploads: in one commit, repeatable, and refused before anything is changed."""

import shutil
from unittest.mock import Mock

import pytest
from huggingface_hub import HfApi, constants

from tests.hub.published import REPOSITORY, card_of_network, fine_tuned, write_run
from tests.hub_server import TOKEN, Commit
from tests.models.cases import randomize
from timm_moe_dg.errors import ArgumentError, HubError
from timm_moe_dg.hub.push import push_folder, push_space, write_checksums, write_space


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    card_of_network(folder, fine_tuned())
    return folder


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
    assert set(files) == {"README.md", "SHA256SUMS", "config.json", "model.safetensors"}
    assert push_folder(folder, REPOSITORY).oid == first.oid
    assert len(hub.commits(REPOSITORY)) == 1


def test_a_run_arrives_with_its_own_files_and_no_pickle_and_its_page_in_a_space(hub, tool, tmp_path, capfd):
    run = write_run(tmp_path / "run")
    words = [str(run), "--repo-id", REPOSITORY, "--output", str(tmp_path), "--with-space"]
    tool.main(words)
    files = hub.repositories[REPOSITORY].at("main").files
    weights = "model.safetensors"
    assert set(files) == {"README.md", "SHA256SUMS", "config.json", "learning_curves.png", weights, "results.jsonl"}
    assert files[weights] == (run / "best" / weights).read_bytes()
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
    hub.breaks_commits = True
    with pytest.raises(HubError, match=r"nothing was committed.*someone/network is new and empty\. Repeat"):
        push_folder(folder, REPOSITORY)
    assert hub.repositories[REPOSITORY].at("main").files == {}
    with pytest.raises(HubError, match=r"someone/network is unchanged"):
        push_folder(folder, REPOSITORY)
    hub.breaks_commits = False
    push_folder(folder, REPOSITORY)
    assert len(hub.repositories[REPOSITORY].at("main").files) == 4


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
    card_of_network(tmp_path, fine_tuned(**other))
    with pytest.raises(ArgumentError, match=rf"holds another model \({difference}\); .*--replace-model"):
        push_folder(tmp_path, REPOSITORY)
    assert len(hub.commits(REPOSITORY)) == 1
    push_folder(tmp_path, REPOSITORY, replace_model=True)
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


def edit(hub, name, content, repository=REPOSITORY):
    """Changes a file on the Hub, as its page does."""
    commits = hub.repositories[repository].branches["main"]
    commits.append(Commit(f"{len(commits):040}", {**commits[-1].files, name: content}, f"Update {name}", (name,)))


def trained_further(folder):
    """Changes the weights and the card."""
    shutil.rmtree(folder)
    card_of_network(folder, randomize(fine_tuned(), seed=5))
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nMore steps.\n")
    write_checksums(folder)
    return folder


@pytest.mark.parametrize("options", [{}, {"revision": "next"}, {"create_pr": True}, {"revision": "main"}])
def test_a_card_that_was_edited_on_the_hub_is_kept_until_it_is_deleted(options, hub, folder, copy, caplog):
    push_folder(folder, REPOSITORY)
    card = (folder / "README.md").read_bytes().replace(b"license: unknown", b"license: mit") + b"\nNot for hunting.\n"
    edit(hub, "README.md", card)
    for number in (1, 2):  # the second one finds what the first one wrote
        later = trained_further(copy)
        push_folder(later, REPOSITORY, **options)
        branch = f"refs/pr/{number}" if "create_pr" in options else options.get("revision") or "main"
        files = hub.repositories[REPOSITORY].at(branch).files
        assert files["README.md"] == card
        assert files["model.safetensors"] == (later / "model.safetensors").read_bytes()
    assert caplog.text.count("keeps README.md") == 2
    del hub.repositories[REPOSITORY].branches["main"][-1].files["README.md"]
    push_folder(later, REPOSITORY)
    assert hub.repositories[REPOSITORY].at("main").files["README.md"] == (later / "README.md").read_bytes()


def test_a_card_that_nobody_edited_is_replaced(hub, folder, copy, caplog):
    push_folder(folder, REPOSITORY)
    push_folder(trained_further(copy), REPOSITORY)
    files = hub.repositories[REPOSITORY].at("main").files
    assert files == {path.name: path.read_bytes() for path in copy.iterdir()}
    assert "keeps" not in caplog.text


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "results.jsonl", "figures/routing.png"])
@pytest.mark.parametrize("was_pushed", [False, True])
def test_other_files_that_somebody_wrote_or_edited_are_not_replaced_unasked(name, was_pushed, hub, folder, copy):
    push_folder(folder, REPOSITORY)
    for file in ("results.jsonl", "figures/routing.png"):
        (copy / file).parent.mkdir(exist_ok=True)
        (copy / file).write_text(f"by the run: {file}")
    write_checksums(copy)
    if was_pushed:
        push_folder(copy, REPOSITORY)
    files = hub.repositories[REPOSITORY].at("main").files
    edit(hub, name, files.get(name, b"mine") + b" ")
    later = shutil.copytree(copy, copy.with_name("later"))
    (later / "config.json").write_text((later / "config.json").read_text() + "\n")
    count = len(hub.commits(REPOSITORY))
    with pytest.raises(ArgumentError, match=rf"^repo_id='{REPOSITORY}': {name} there .*--replace-model"):
        push_folder(later, REPOSITORY)
    assert len(hub.commits(REPOSITORY)) == count
    push_folder(later, REPOSITORY, replace_model=True)
    assert hub.repositories[REPOSITORY].at("main").files[name] == (later / name).read_bytes()


def test_a_model_that_another_program_published_is_not_replaced_unasked(hub, folder, copy, caplog):
    push_folder(folder, REPOSITORY)
    del hub.repositories[REPOSITORY].branches["main"][-1].files["SHA256SUMS"]  # as earlier versions
    push_folder(folder, REPOSITORY)  # nothing would change
    del hub.repositories[REPOSITORY].branches["main"][-1].files["SHA256SUMS"]
    with pytest.raises(ArgumentError, match=r"model\.safetensors there"):
        push_folder(trained_further(copy), REPOSITORY)
    push_folder(copy, REPOSITORY, replace_model=True)
    assert "keeps README.md" in caplog.text


def test_files_of_a_space_that_were_edited_are_kept(hub, folder, tmp_path, caplog):
    shutil.copytree(folder, tmp_path / "model")
    space = write_space(tmp_path / "model", REPOSITORY)
    push_space(space, REPOSITORY)
    edit(hub, "requirements.txt", b"timm_moe_dg @ git+https://host/mine\n", f"space:{REPOSITORY}")
    for _ in range(2):
        (space / "requirements.txt").write_text("timm_moe_dg[demo]==9\n")
        (space / "app.py").write_text("newer")
        write_checksums(space)
        push_space(space, REPOSITORY)
    files = hub.repositories[f"space:{REPOSITORY}"].at("main").files
    assert files["requirements.txt"] == b"timm_moe_dg @ git+https://host/mine\n"
    assert files["app.py"] == b"newer"
    assert "keeps requirements.txt" in caplog.text
