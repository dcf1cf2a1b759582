"""Train a Llama on text, from scratch or on from a checkpoint.

    llamalab pretrain                                          # a small Llama on a novel: 3 minutes on 2 CPU cores
    llamalab pretrain --data my.txt --n-layer 8 --dim 512 --steps 5000 --dtype autocast --compile
    llamalab pretrain --model SmolLM2-135M.gguf --data texts/ --lr 1e-4 --steps 200 --dtype bf16

With no options, loss falls from 8.4 to about 3.9 (validation 4.5, 1.65 bits per byte) and the sample at the end reads
like English. The run directory (runs/pretrain-1, ...) is a model directory that `llamalab generate` and transformers
load, with metrics.jsonl, loss.png, recipe.json, sample.txt, and state/ to resume from. Ctrl-C saves first; --resume
goes on bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import tyro


@dataclass
class Config:
    model: str | None = None
    """Preset (its sizes, new weights), or model directory, file or hub id to train on from; default: new, of the sizes below."""
    data: str | None = None
    """Text file, folder, JSONL, parquet, hub data set; default: the novel that comes with the package."""
    val_data: str | None = None
    """The same, for validation; default: the last tenth of --data."""
    tokenizer: str | None = None
    """Directory, file, hub id, or "bytes"; default: that of --model, or the one that comes with the package."""
    n_layer: int = 4
    """Blocks of a new model."""
    n_head: int = 3
    """Query heads."""
    n_local_heads: int = 3
    """Key/value heads."""
    dim: int = 192
    """Width of the residual stream."""
    intermediate_size: int = 512
    """Width of the feed-forward layer."""
    steps: int = 600
    """Optimizer steps."""
    batch: int = 4
    """Rows of a micro-batch."""
    seq_len: int = 256
    """Tokens of a row."""
    accumulate: int = 1
    """Micro-batches of an optimizer step."""
    lr: float | None = None
    """Peak learning rate; default: 5e-3 for new weights, 1e-4 to train on from a checkpoint."""
    min_lr: float = 0.0
    """Rate of the last step, where the schedule decays."""
    warmup: int | None = None
    """Steps of linear warm-up; default: a tenth of the steps, at most 100."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the rate goes on from its peak; wsd stays there and decays at the end."""
    decay_fraction: float = 0.2
    """Share of the steps in which wsd decays."""
    optimizer: Literal["adamw", "adamw8bit", "muon", "sgd"] | None = None
    """muon takes the matrices of the blocks and AdamW the rest; default: muon for new weights, adamw from a checkpoint."""
    weight_decay: float = 0.1
    """Of matrices; norms and biases have none."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    seed: int = 0
    """Of weights, batches, rounding and samples."""
    dtype: Literal["fp32", "bf16", "autocast"] = "fp32"
    """bf16: weights and all; autocast: float32 weights, bf16 products."""
    stochastic_rounding: bool = False
    """Round updates of bf16 weights at random, so that small ones are not lost."""
    device: str | None = None
    """cpu, cuda, mps; default: the best there is."""
    compile: bool = False
    """Compile the blocks: slower to start (about a minute), then faster."""
    checkpoint_activations: bool = False
    """Keep only each block's input for backward: less memory, a third more compute."""
    eval_every: int = 100
    """Steps between validations; there is one after the last step too."""
    eval_tokens: int = 50_000
    """Validate on at most so many tokens."""
    sample_every: int = 0
    """Steps between samples shown; 0: only at the end."""
    prompt: str = "It is"
    """What samples begin with."""
    sample_tokens: int = 100
    """Tokens of a sample, if the model's limit leaves room for them."""
    save_every: int = 200
    """Steps between training states."""
    keep: int = 2
    """Newest states kept."""
    out: str | None = None
    """Run directory; default: the next free runs/pretrain-<n>."""
    resume: bool = False
    """Go on with the run at --out, or with the last one; other options as they were."""


def main(cfg: Config) -> None:
    import shlex

    from llamalab.checkpoint import local_path, write_model_files
    from llamalab.corpus import ASSETS
    from llamalab.data import Windows
    from llamalab.errors import UserError
    from llamalab.files import write_atomic
    from llamalab.optim import build_optimizer
    from llamalab.report import Report, command, plot_loss, run_directory, train_flops_per_token, write_recipe
    from llamalab.runtime import pick_device, reuse_freed_memory, set_threads
    from llamalab.tokenizer import load_tokenizer
    from llamalab.train import POLICIES, check_config, stop_on_signal, train_steps
    from llamalab.train_setup import Watch, digest, is_checkpoint, prepare_, read_texts, start_model
    from llamalab.train_state import load_state, newest_state, save_state

    fresh = not is_checkpoint(cfg.model)
    defaults = {"lr": 5e-3 if fresh else 1e-4, "optimizer": "muon" if fresh else "adamw", "warmup": min(100, cfg.steps // 10)}
    cfg = replace(cfg, **{name: value for name, value in defaults.items() if getattr(cfg, name) is None})
    check_config(cfg)
    sizes = {name: getattr(cfg, name) for name in ("n_layer", "n_head", "n_local_heads", "dim", "intermediate_size")}
    odd = [name for name, value in sizes.items() if cfg.model is not None and value != getattr(Config, name)]
    if odd:
        raise UserError(f"--model {cfg.model} has its own sizes; leave out {', '.join(odd)}")
    if cfg.optimizer == "sgd" and cfg.beta2 != Config.beta2:
        raise UserError("beta2 is of the other optimizers; sgd has none")
    run_dir = run_directory("pretrain", cfg)
    device = pick_device(cfg.device)
    set_threads()
    reuse_freed_memory()

    tokenizer = load_tokenizer(cfg.tokenizer or (ASSETS if fresh else local_path(cfg.model)))
    train, held_out = read_texts(cfg.data, cfg.val_data, tokenizer, run_dir.parent / "tokens")
    windows = Windows(train, cfg.seq_len, cfg.batch, cfg.seed)
    model = start_model(cfg.model, sizes, tokenizer, cfg.seq_len, cfg.seed, device, POLICIES[cfg.dtype][0])
    watch = Watch(cfg, model, tokenizer, held_out)
    prepare_(model, cfg.compile, cfg.checkpoint_activations)
    betas = (0.9, cfg.beta2)
    optimizer = build_optimizer(cfg.optimizer, model, cfg.lr, cfg.weight_decay, betas, cfg.stochastic_rounding, cfg.seed)
    found = newest_state(run_dir) if cfg.resume else None
    settings = {**vars(cfg), "digest of the text": digest(train)}  # resuming on other text would not be the same run
    start = load_state(found, model, optimizer, settings) if found else 0

    parameters = sum(p.numel() for p in model.parameters())
    if not cfg.resume:
        write_recipe(run_dir, "pretrain", cfg, model.config, parameters, train_tokens=len(train), validation_tokens=len(watch.tokens))
    done, finished = start, start >= cfg.steps
    with stop_on_signal() as stop, Report(run_dir, cfg.steps, device, start, train_flops_per_token(model.config, cfg.seq_len)) as report:
        report.say(f"{parameters:,} parameters, {len(train):,} tokens to train on, on {device}, into {run_dir}")
        if not (fresh or start):
            report.before_training(watch.validate())
        for step in train_steps(model, optimizer, windows, cfg, start, run_dir=run_dir):
            done = step.index + 1
            finished = done == cfg.steps
            report.step(step, **(watch.validate() if finished or done % cfg.eval_every == 0 else {}))
            if finished or stop.is_set() or done % cfg.save_every == 0:
                save_state(run_dir, done, model, optimizer, settings, cfg.keep, tokenizer)
            if stop.is_set():
                break
            if cfg.sample_every and done % cfg.sample_every == 0 and not finished:
                report.say(watch.sample())

    write_model_files(run_dir, model, tokenizer)
    plot_loss(run_dir, f"llamalab pretrain: {parameters / 1e6:.1f} M parameters")
    if not finished:
        print(f"stopped after step {done} of {cfg.steps}; all of it is in {run_dir}. To go on:")
        print(f"  {command('pretrain', cfg, out=run_dir, resume=True)}")
        return
    text = watch.sample()
    write_atomic(run_dir / "sample.txt", text + "\n")
    print(f"{report.summary()}\n\n{text}\n\nThe model, metrics.jsonl, loss.png, recipe.json and sample.txt are in {run_dir}. Next:")
    room = model.config.block_size - len(watch.prompt)
    short = f" --max-new-tokens {room}" if room < 128 else ""
    name = shlex.quote(str(run_dir))
    print(f"  llamalab generate {name} {shlex.quote(cfg.prompt)} --temperature 0.8{short}")
    print(f"  llamalab evaluate {name}")
    print(f"  llamalab pretrain --model {name} --data more-text.txt")


if __name__ == "__main__":
    main(tyro.cli(Config))
