"""What every test file shares: a tiny model to build, the folder of real data, one thread on a busy machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llamalab.config import ModelArgs
from llamalab.model import Transformer


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """One thread unless OMP_NUM_THREADS says otherwise: tiny tensors gain nothing from more."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"  # also for processes that tests start, and for runtime.set_threads()
        torch.set_num_threads(1)


def build_tiny(preset: str = "tiny", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> Transformer:
    """A small random model, ready for `model(idx)`.

    Every parameter matters: matrices have variance 1/fan_in (logits of order one, so that a wrong formula is
    far from a right one), norm gains scatter around 1 and biases around 0. `overrides` are ModelArgs fields.
    """
    config = dataclasses.replace(ModelArgs.from_name(preset), **overrides)
    model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() == 2:
                p.copy_(noise / p.shape[1] ** 0.5)
            else:
                p.copy_(0.2 * noise + (0 if name.endswith("bias") else 1))
    model.setup_caches(1, config.block_size, training=True)
    return model.to(dtype).eval()


@pytest.fixture
def tiny() -> Callable[..., Transformer]:
    """The builder `tiny(preset="tiny", seed=0, dtype=torch.float32, **overrides)`; see `build_tiny`."""
    return build_tiny


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of the real checkpoint and packages (`model/`, `wheels/`), named by LLAMALAB_DATA."""
    folder = os.environ.get("LLAMALAB_DATA")
    if not folder:
        pytest.skip("LLAMALAB_DATA is not set: it names the folder with model/ and wheels/")
    path = Path(folder)
    if not (path / "model").is_dir():
        pytest.skip(f"LLAMALAB_DATA={folder} holds no model/ folder")
    return path
