"""A model from the Hugging Face hub.

    llamalab download HuggingFaceTB/SmolLM2-135M-Instruct
    llamalab download bartowski/SmolLM2-135M-Instruct-GGUF --gguf "*Q8_0*" --out models/smol

Prints where the files are; every other verb takes that path, or the hub id itself. Only files that cannot run code are
fetched: safetensors (or GGUF), JSON, tokenizers, text. Without --out they go to the hub's own cache, which other programs
share. Models behind a licence need `hf auth login` first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass
class Config:
    repo: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="REPO")]]
    """Hub id, such as HuggingFaceTB/SmolLM2-135M-Instruct."""
    out: str | None = None
    """Directory to put the files in; default: the hub's cache."""
    revision: str | None = None
    """Branch, tag or commit; default: main."""
    gguf: str | None = None
    """Fetch the GGUF files whose names match this pattern, such as "*Q8_0*", and no safetensors."""


def main(cfg: Config) -> None:
    from llamalab.checkpoint import download, open_source

    path = download(cfg.repo, cfg.out, cfg.revision, cfg.gguf)
    for file in sorted(path.iterdir()):
        if file.is_file():
            print(f"  {file.name} {file.stat().st_size / 1e6:.3f} MB")
    for model in sorted(path.glob("*.gguf")) if cfg.gguf else [path]:
        source = open_source(model)  # a model this code cannot compute, or a shard that is missing, shows now
        print(f"{model}: {source.config.family}, {source.config.n_layer} layers, {len(source.tensors)} tensors")


if __name__ == "__main__":
    main(tyro.cli(Config))
