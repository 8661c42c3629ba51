"""Registers the models as soon as timm is there, so that importing the package takes neither timm nor torch."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from .cli.garbage import uncollected

_TIMM, _MODELS = "timm", f"{__package__}.models"


def register_with_timm() -> None:
    """Imports the models, which registers them: now if timm is imported already, else right after it is."""
    if _TIMM in sys.modules:
        import_module(_MODELS)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finds timm as the others do, and has the models imported after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _TIMM:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenModels(spec.loader, self)
        return spec


class _ThenModels(Loader):
    """Runs timm with its own loader, then imports the models."""

    def __init__(self, own: Loader, watch: _Watch) -> None:
        self._own, self._watch = own, watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._own  # which also reads its resources and its source
        with uncollected():
            self._own.exec_module(module)
            if self._watch in sys.meta_path:  # not where timm is reloaded
                sys.meta_path.remove(self._watch)
            import_module(_MODELS)
