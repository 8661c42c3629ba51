"""The folder of a Space of the Hub: a page on which people try a model, `timm-moe-dg demo` for everyone."""

from pathlib import Path

from huggingface_hub import ModelCard, SpaceCardData

from .. import __version__
from ..storage.files import replaced


def write_space(model: Path, repo_id: str) -> Path:
    """Writes the Space of a model folder beside it: app.py, requirements.txt and README.md. Returns the Space's folder.

    The model is, or will be, published as OWNER/NAME. Its card's license is the Space's too.
    """
    license = ModelCard.load(model / "README.md").data.license
    facts = {"sdk": "gradio", "app_file": "app.py", "models": [repo_id], "license": license}
    header = SpaceCardData(title=repo_id.partition("/")[2], **facts).to_yaml()
    link = f"[{repo_id}](https://huggingface.co/{repo_id})"
    target = model.with_name(f"{model.name}--space")
    with replaced(target) as folder:
        (folder / "app.py").write_text(f'from timm_moe_dg.inference.demo import serve\n\nserve("hf-hub:{repo_id}")\n')
        (folder / "requirements.txt").write_text(f"timm_moe_dg[demo]=={__version__}\n")
        (folder / "README.md").write_text(f"---\n{header}\n---\n\nTry {link} on your own images.\n")
    return target
