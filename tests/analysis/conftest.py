"""Figures that a test draws."""

import pytest

from timm_moe_dg.analysis import style


@pytest.fixture
def figures(monkeypatch):
    """Collects the figures that are opened, in order."""
    pytest.importorskip("matplotlib")
    opened, new_figure = [], style.new_figure
    monkeypatch.setattr(style, "new_figure", lambda *size: opened.append(new_figure(*size)) or opened[-1])
    return opened
