"""Uploads of a folder to a Hub repository in one commit, and of the Space on which people try the model."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard, SpaceCardData, constants
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

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
    skipped, and an edited card is kept. With `create_pr` the branch is not changed and a pull request is opened.
    `replace_model` allows a repository with another architecture, other classes or edited files.

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
        edited = _edited(api, folder, repo_id, revision) if exists else set()
        if not replace_model and (others := sorted(edited - {CARD})):
            reason = "would be replaced, and are not as this command wrote them last"
            remedy = f"{', '.join(others)} there {reason}; delete them there, or give --replace-model"
            raise ArgumentError.of("repo_id", repo_id, remedy)
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
    """Writes SHA256SUMS, by which a later upload finds the files that others edited."""
    lines = [f"{sha256(path)}  {name}\n" for name, path in _contents(folder).items()]
    (folder / SUMS).write_text("".join(lines))


def _contents(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _edited(api: HfApi, folder: Path, repo_id: str, revision: str | None = None, repo_type: str = "model") -> set[str]:
    """Finds files that the folder would replace in a repository, and that no upload wrote as they are there."""
    if revision and not api.revision_exists(repo_id, revision):
        revision = None  # a new branch starts as main
    where: dict[str, Any] = {"revision": revision, "repo_type": repo_type}
    info: Any = api.repo_info(repo_id, files_metadata=True, **where)
    there = {file.rfilename: file for file in info.siblings or ()}
    sums = Path(api.hf_hub_download(repo_id, SUMS, **where)).read_text(errors="replace") if SUMS in there else ""
    contents = _contents(folder)
    edited = set()
    for name in (contents.keys() & there.keys()) - {SUMS}:
        stored = there[name].lfs
        digest = stored.sha256 if stored else sha256(Path(api.hf_hub_download(repo_id, name, **where)))
        if digest != sha256(contents[name]) and f"{digest}  {name}" not in sums.splitlines():
            edited.add(name)
    return edited


def _additions(folder: Path, repo_id: str, kept: set[str]) -> list[CommitOperationAdd]:
    """Lists the files to send, and logs those that stay as they were edited on the Hub."""
    for name in sorted(kept):
        _logger.warning(f"repo_id={repo_id!r}: keeps {name} as edited, with its numbers; delete it there for a new one")
    return [CommitOperationAdd(name, path) for name, path in _contents(folder).items() if name not in kept]


def _check_same_model(api: HfApi, folder: Path, repo_id: str, revision: str | None) -> None:
    if not api.file_exists(repo_id, CONFIG, revision=revision):
        return
    ours, theirs = map(read_config, (folder / CONFIG, Path(api.hf_hub_download(repo_id, CONFIG, revision=revision))))
    pairs = {name: (theirs.get(name), ours.get(name)) for name in ("architecture", "num_classes", "label_names")}
    different = [f"{name} {pair[0]}, not {pair[1]}" for name, pair in pairs.items() if pair[0] != pair[1]]
    if different:
        remedy = f"holds another model ({'; '.join(different)}); give another repository, or --replace-model"
        raise ArgumentError.of("repo_id", repo_id, remedy)


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
        operations = _additions(folder, repo_id, _edited(api, folder, repo_id, repo_type="space") if exists else set())
        return api.create_commit(repo_id, operations, commit_message="Add the page of the model", repo_type="space")
