"""The folder of a Space of the Hub: a page on which people try a model, `timm-moe-dg demo` for everyone."""

from pathlib import Path

from huggingface_hub import ModelCard, SpaceCard, SpaceCardData

from .. import __version__


def fill_space(folder: Path, model: Path, repo_id: str) -> None:
    """Writes app.py, requirements.txt and README.md for the model in another folder, published as OWNER/NAME."""
    texts = {
        "app.py": f'from timm_moe_dg.inference.demo import serve\n\nserve("hf-hub:{repo_id}")\n',
        "requirements.txt": f"timm_moe_dg[demo]=={__version__}\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    license = ModelCard.load(model / "README.md").data.license
    facts = {"sdk": "gradio", "app_file": "app.py", "models": [repo_id], "license": license}
    data = SpaceCardData(title=repo_id.partition("/")[2], **facts)
    link = f"[{repo_id}](https://huggingface.co/{repo_id})"
    card = SpaceCard(
        f"---\n{data.to_yaml()}\n---\n\nTry {link} on your own images: `timm-moe-dg demo`, for everyone.\n"
    )
    card.save(folder / "README.md")
