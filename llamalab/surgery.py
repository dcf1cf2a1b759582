"""The one way a layer is replaced or wrapped. Names in `state_dict()` never change."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llamalab.attention import blocked_attention


def swap_linears(
    model: nn.Module, make: Callable[[str, nn.Linear], nn.Module | None], skip: tuple[str, ...] = ("output",)
) -> list[str]:
    """Replace linears in place by `make(name, linear)`; None keeps one.

    Args:
        skip: names (or last parts of names) left alone; the head by default.

    Returns:
        Names of the linears that stay as they were, so that none is skipped in silence.
    """
    kept = []
    for name, linear in list(linears(model)):
        new = None if name in skip or name.rpartition(".")[2] in skip else make(name, linear)
        if new is None:
            kept.append(name)
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    return kept


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """(name, module) of every nn.Linear."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear))


def split_qkv(attention: nn.Module) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """Three linears whose weights are views of `attention.wqkv`'s rows: query, key, value."""
    fused = attention.wqkv
    parts = []
    weights = fused.weight.split(attention.sizes)
    biases = fused.bias.split(attention.sizes) if fused.bias is not None else [None] * 3
    for weight, bias in zip(weights, biases, strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.detach(), requires_grad=fused.weight.requires_grad)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach(), requires_grad=fused.bias.requires_grad)
        parts.append(linear)
    return tuple(parts)


def fuse_qkv(attention: nn.Module, state: dict[str, Tensor], prefix: str, *_) -> None:
    """Load-time hook: separate wq, wk, wv (Meta, older gpt-fast files) become wqkv."""
    for kind in ("weight", "bias"):
        names = [f"{prefix}{part}.{kind}" for part in ("wq", "wk", "wv")]
        if all(name in state for name in names):
            state[f"{prefix}wqkv.{kind}"] = torch.cat([state.pop(name) for name in names])


def checkpoint_blocks_(model: nn.Module) -> nn.Module:
    """Keep only each block's input for backward and compute the rest again there (arXiv:1604.06174)."""

    def recompute(forward: Callable) -> Callable:
        # a closure, not functools.partial, which torch.compile does not recognise as checkpointing
        return lambda *args: checkpoint(forward, *args, use_reentrant=False)

    for layer in model.layers:
        layer.forward = recompute(layer.forward)
    return model


def compile_blocks_(model: nn.Module, **options) -> nn.Module:
    """Compile each block on its own: the blocks are alike, so one compile serves them all.

    `module.compile()` (not `torch.compile(module)`) keeps parameter names as they are. The memory budget below
    is torch's, for the whole process: values that are cheap to compute again are not kept for backward. On
    SmolLM2's block it took 37 MB of activations to 23 at the same speed.
    """
    torch._functorch.config.activation_memory_budget = 0.8
    for layer in model.layers:
        layer.compile(fullgraph=True, **options)
    return model




def block_attention_(model: nn.Module) -> nn.Module:
    """Use `attention.blocked_attention` for training: worth it in compiled bf16 on a CPU, nowhere else."""
    for layer in model.layers:
        layer.attention.attend = blocked_attention
    return model
