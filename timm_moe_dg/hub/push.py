"""Uploads of a folder to a Hub repository in one commit, and of the Space on which people try the model."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard, SpaceCardData, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    RevisionNotFoundError,
)

from .. import __version__
from ..errors import ArgumentError, HubError, MoeDgError
from ..networks.build import CONFIG, read_config, sha256
from ..storage.files import replaced

CARD, SUMS = "README.md", "SHA256SUMS"
_logger = logging.getLogger(__name__)
_TOKEN = "set HF_TOKEN to a token with write access, or log in with `hf auth login`"


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    replace_model: bool = False,
) -> CommitInfo:
    """Uploads every file of a folder with config.json and README.md, and returns the repository's latest commit.

    The repository OWNER/NAME and the branch, None for main, are created if needed. Files that the repository has are
    skipped, and a card that was edited there is kept. With `create_pr` the branch is not changed and a pull request is
    opened. `replace_model` allows a repository with another architecture, other classes or other edited files.

    Raises:
        ArgumentError: The repository holds another model or edited files, or is public although `private` is True.
        HubError: The token is missing or wrong, the Hub cannot be reached, or it refuses.
    """
    api = HfApi(library_name="timm_moe_dg")
    with _explained(repo_id, "nothing was sent"):
        api.whoami()
        # All checks come before the first change on the Hub.
        exists = api.repo_exists(repo_id)
        if exists and private and not api.model_info(repo_id).private:
            remedy = "is public; make it private in its settings first, or leave out --private"
            raise ArgumentError.of("repo_id", repo_id, remedy)
        if exists and not replace_model:
            _check_same_model(api, folder, repo_id, revision)
        edited = _edited_files(api, folder, repo_id, revision=revision) if exists else set()
        if edited - {CARD} and not replace_model:
            remedy = f"{', '.join(sorted(edited - {CARD}))} there were edited, or not written by this command; delete "
            raise ArgumentError.of("repo_id", repo_id, f"{remedy}them on the Hub, or give --replace-model")
        # None leaves the visibility to the settings of an organization.
        api.create_repo(repo_id, private=private or None, exist_ok=True)
    operations = _additions(folder, repo_id, edited & {CARD})
    architecture = read_config(folder / CONFIG)["architecture"]
    unfinished = (
        f"nothing was committed: {repo_id} is {'unchanged' if exists else 'new and empty'}. Repeat the same command: "
        "files that the Hub has received are not sent again, and a commit that did arrive is not repeated"
    )
    with _explained(repo_id, unfinished):
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        ours = {".gitattributes", CARD, *(operation.path_in_repo for operation in operations)}
        theirs = {file.rfilename for file in api.model_info(repo_id, revision=revision).siblings or ()}
        if stale := sorted(theirs - ours):
            remedy = "delete old files on the Hub"
            _logger.warning(f"repo_id={repo_id!r}: keeps {', '.join(stale)}, perhaps of another network; {remedy}")
        # Not `upload_folder`, which makes several commits of large folders
        return api.create_commit(
            repo_id, operations, commit_message=f"Add {architecture}", revision=revision, create_pr=create_pr
        )


def write_checksums(folder: Path) -> None:
    """Writes SHA256SUMS, as the program sha256sum does, by which a later upload finds the files that others edited."""
    lines = [f"{sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in _files(folder)]
    (folder / SUMS).write_text("".join(lines))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _edited_files(api: HfApi, folder: Path, repo_id: str, **where: str | None) -> set[str]:
    """Finds files of a repository that no upload wrote as they are, and that the folder would replace."""
    try:
        siblings = api.repo_info(repo_id, files_metadata=True, **where).siblings or ()
    except RevisionNotFoundError:  # a new branch starts as main
        return _edited_files(api, folder, repo_id)
    written: dict[str, str] = {}
    if any(file.rfilename == SUMS for file in siblings):
        text = Path(api.hf_hub_download(repo_id, SUMS, **where)).read_text(errors="replace")
        written = {name: digest for digest, name in re.findall(r"^(\w{64})  (.+)$", text, re.MULTILINE)}
    edited = set()
    for file in siblings:
        name, path = file.rfilename, folder / file.rfilename
        if name != SUMS and path.is_file():
            stored = file.lfs.sha256 if file.lfs else sha256(Path(api.hf_hub_download(repo_id, name, **where)))
            if stored not in (written.get(name), sha256(path)):
                edited.add(name)
    return edited


def _additions(folder: Path, repo_id: str, kept: set[str]) -> list[CommitOperationAdd]:
    """Lists the files of a folder to send, without those that stay as they are on the Hub, which are logged."""
    if kept:
        remedy = "delete them on the Hub to have them written again"
        _logger.warning(f"repo_id={repo_id!r}: keeps {', '.join(sorted(kept))} as edited there; {remedy}")
    names = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    return [CommitOperationAdd(name, path) for name, path in names.items() if name not in kept]


def _check_same_model(api: HfApi, folder: Path, repo_id: str, revision: str | None) -> None:
    try:
        theirs = _read_model(Path(api.hf_hub_download(repo_id, CONFIG, revision=revision)).parent)
    except LocalEntryNotFoundError:  # a subclass of EntryNotFoundError, but raised for a broken connection
        raise
    except (EntryNotFoundError, RevisionNotFoundError):
        return
    ours = _read_model(folder)
    different = [f"{name} {theirs[name]}, not {ours[name]}" for name in ours if theirs[name] != ours[name]]
    if different:
        remedy = f"holds another model ({'; '.join(different)}); give another repository, or --replace-model"
        raise ArgumentError.of("repo_id", repo_id, remedy)


def _read_model(folder: Path) -> dict[str, object]:
    table = read_config(folder / CONFIG)
    return {name: table.get(name) for name in ("architecture", "num_classes", "label_names")}


@contextmanager
def _explained(repo_id: str, state: str) -> Iterator[None]:
    """Turns huggingface_hub's exceptions into a `HubError` whose message ends with the state of the repository."""
    try:
        yield
    except MoeDgError:
        raise
    except (LocalTokenNotFoundError, HfHubHTTPError) as error:
        message = " ".join(str(error).split())  # several lines
        raise HubError(f"repo_id={repo_id!r}: {message}; {_TOKEN}; {state}") from error
    except Exception as error:  # the exceptions of the HTTP library have no base class of their own
        cause = error.__cause__ or error
        advice = f"check the connection to {constants.ENDPOINT}"
        raise HubError(f"repo_id={repo_id!r}: {type(cause).__name__}: {cause}; {advice}; {state}") from error


def write_space(model: Path, repo_id: str) -> Path:
    """Writes the Space of a model folder beside it: app.py, requirements.txt and README.md. Returns the Space's folder.

    The model is, or will be, published as OWNER/NAME. Its card's license is the Space's too.
    """
    license = ModelCard.load(model / CARD).data.license
    facts = {"sdk": "gradio", "app_file": "app.py", "models": [repo_id], "license": license}
    header = SpaceCardData(title=repo_id.partition("/")[2], **facts).to_yaml()
    link = f"[{repo_id}](https://huggingface.co/{repo_id})"
    target = model.with_name(f"{model.name}--space")
    with replaced(target) as folder:
        (folder / "app.py").write_text(f'from timm_moe_dg.__main__ import main\n\nmain(["demo", "hf-hub:{repo_id}"])\n')
        (folder / "requirements.txt").write_text(f"timm_moe_dg[demo]=={__version__}\n")
        (folder / CARD).write_text(f"---\n{header}\n---\n\nTry {link} on your own images.\n")
        write_checksums(folder)
    return target


def push_space(folder: Path, repo_id: str, *, private: bool = False) -> CommitInfo:
    """Uploads a folder to a Space of the Hub that runs gradio, created if needed. Files that were edited there stay.

    Raises:
        HubError: As in `push_folder`.
    """
    api = HfApi(library_name="timm_moe_dg")
    with _explained(repo_id, "the model is published, and its Space is not; repeat the same command"):
        space: dict[str, Any] = {"repo_type": "space", "space_sdk": "gradio"}
        exists = api.repo_exists(repo_id, repo_type="space")
        api.create_repo(repo_id, private=private or None, exist_ok=True, **space)
        kept = _edited_files(api, folder, repo_id, repo_type="space") if exists else set()
        operations = _additions(folder, repo_id, kept)
        return api.create_commit(repo_id, operations, commit_message="Add the page of the model", repo_type="space")
