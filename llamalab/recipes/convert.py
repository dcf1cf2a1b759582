"""One checkpoint format into another, with its tokenizer and chat template.

    llamalab convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2          # a Hugging Face directory
    llamalab convert runs/pretrain-1 my-model.gguf --format q8_0      # for llama.cpp
    llamalab convert Llama-2-7b llama2 --dtype bfloat16               # Meta's consolidated.*.pth

SRC may be any of: a Hugging Face directory or hub id, Meta's (consolidated.*.pth), torchao's or gpt-fast's (model.pth), a GGUF
file. Prints what was read and what was written. Numbers change only where --dtype or --format asks for fewer digits, and a
quantized GGUF is read as the numbers it stands for. The source is checked whole before anything is written; the result
appears whole or not at all, and never in the place of something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass
class Config:
    source: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SRC")]]
    """Model directory, file, or Hugging Face hub id."""
    target: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DST")]]
    """Where to write: a name that ends in .gguf is a GGUF file, any other a Hugging Face directory."""
    format: Literal["auto", "hf", "f32", "f16", "bf16", "q8_0", "q4_0"] = "auto"
    """hf, or the kind of GGUF; auto: hf, or the GGUF kind of the weights as they are."""
    dtype: str | None = None
    """float32, bfloat16 or float16 for a Hugging Face directory; default: as stored."""
    tokenizer: str = "auto"
    """auto: the source's; none: write none; else where to read it from."""


def main(cfg: Config) -> None:
    from pathlib import Path

    from llamalab.checkpoint import load_model, local_path, open_source, save_model
    from llamalab.errors import UserError
    from llamalab.gguf_file import write_gguf
    from llamalab.runtime import pick_dtype
    from llamalab.tokenizer import load_tokenizer

    target, to_gguf = Path(cfg.target), cfg.target.endswith(".gguf")
    if cfg.format != "auto" and to_gguf == (cfg.format == "hf"):
        raise UserError(f"--format {cfg.format} does not go with {cfg.target}: GGUF kinds are for names that end in .gguf, hf for others")
    if cfg.dtype and to_gguf:
        raise UserError("--dtype is for Hugging Face directories; say what the GGUF should hold with --format")
    dtype = pick_dtype(cfg.dtype)
    source = local_path(cfg.source)
    if target.exists() and target.samefile(source):
        raise UserError(f"{cfg.target} is the source itself; choose another name")
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise UserError(f"{cfg.target} exists; choose another name, or remove it first")
    tokenizer = None
    if cfg.tokenizer != "none":
        try:
            tokenizer = load_tokenizer(source if cfg.tokenizer == "auto" else cfg.tokenizer)
        except UserError as error:
            raise UserError(f"{error}. Name another with --tokenizer PATH, or write none with --tokenizer none") from None

    found = open_source(source)
    model = load_model(source, "cpu", dtype)
    weights = next(model.parameters()).dtype
    count, size = sum(p.numel() for p in model.parameters()), sum(p.nbytes for p in model.parameters())
    print(f"read {cfg.source}: {found.layout} layout, {len(found.tensors)} tensors, {found.config.family}, {found.config.n_layer} layers")
    print(f"  {count:,} parameters, {str(weights).removeprefix('torch.')}, {size / 1e6:.1f} MB in memory")
    if tokenizer is not None:
        print(f"  tokenizer of {tokenizer.vocab_size} ids, end ids {list(tokenizer.eos_ids)}, "
              f"{'a' if tokenizer.chat_template else 'no'} chat template")

    if to_gguf:
        kinds = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
        kind = kinds.get(str(weights).removeprefix("torch."), "f32") if cfg.format == "auto" else cfg.format
        written = write_gguf(target, model, kind, tokenizer)
        print(f"wrote {target}: {target.stat().st_size / 1e6:.1f} MB, {kind}\n{written.table()}")
        return
    save_model(target, model, tokenizer)
    print(f"wrote {target}:")
    for file in sorted(target.iterdir()):
        print(f"  {file.name} {file.stat().st_size / 1e6:.3f} MB")


if __name__ == "__main__":
    main(tyro.cli(Config))
