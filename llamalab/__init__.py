"""llamalab: one small Llama that is pretrained, evaluated, generated from and exchanged with others.

Public names are loaded on first use, so that `import llamalab` and `llamalab --help` do not import torch.
"""

from __future__ import annotations

import importlib

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


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'llamalab' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"llamalab.{_PUBLIC[name]}"), name)
    globals()[name] = value  # a submodule of the same name must not shadow the function
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
