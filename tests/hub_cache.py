"""The folder that the Hub's client leaves behind after a download, written without one."""

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fill_cache(cache: Path, repository: str, state_dict: dict[str, Tensor]) -> None:
    """Puts a repository with one `model.safetensors` into a cache, to be read with HF_HUB_CACHE and HF_HUB_OFFLINE.

    Args:
        cache: The cache's folder.
        repository: Such as 'timm/deit_tiny_patch16_224.fb_in1k'.
        state_dict: The weights.
    """
    folder = cache / f"models--{repository.replace('/', '--')}"
    for name in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (folder / name).mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    save_file(state_dict, folder / "snapshots" / COMMIT / "model.safetensors")
