"""llamalab: one small Llama that is pretrained, evaluated, generated from and exchanged with others.

Public names are loaded on first use, so that `import llamalab` and `llamalab --help` do not import torch.
"""

from __future__ import annotations

import importlib
import sys
import types

__version__ = "0.1.0"

_PUBLIC = {
    "ModelArgs": "config",
    "Transformer": "model",
    "KVCache": "cache",
    "load_model": "checkpoint",
    "save_model": "checkpoint",
    "load_tokenizer": "tokenizer",
    "generate": "generate",
    "train_steps": "train",
}
__all__ = sorted(_PUBLIC)


class _Package(types.ModuleType):
    def __getattr__(self, name: str):
        if name not in _PUBLIC:
            raise AttributeError(f"module 'llamalab' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"llamalab.{_PUBLIC[name]}"), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value) -> None:
        # Importing llamalab.generate would bind the submodule here; `from llamalab import generate` means the function.
        if not (name in _PUBLIC and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
