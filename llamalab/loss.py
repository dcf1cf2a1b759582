"""Cross entropy of the next token, summed, from hidden states and head, without ever holding all logits.

A vocabulary of 49152 makes the logits of 2048 tokens the largest tensor of a training step: 200 MB in bf16, and
three times that again for the float32 copy, the probabilities and the gradient of the usual formulation. Yet for
one token all that is needed is

    loss        = log(sum_j exp(z_j)) - z_label        z = W h, float32 statistics
    dloss / dz  = softmax(z) - onehot(label)

and both are at hand as soon as z is. So tokens are taken a chunk at a time, and the gradients of hidden states and
head are formed in the *forward* pass, from the logits still in hand; backward only scales them. That is three
matrix products, as in the plain formulation, and no second look at the logits. (The idea is that of Liger Kernel,
arXiv:2410.10989. torch 2.13 has `F.linear_cross_entropy`; in bf16 on a CPU, at SmolLM2's head, it took 4 to 30 times
as long as this, depending on its options, and its sum was off by up to 0.6 %; this one by less than 1e-5.)

Shapes: N trained tokens, C of them in a chunk, D dim, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llamalab.data import IGNORE, Batch

__all__ = ["IGNORE", "cross_entropy_sum", "head_loss_sum"]

#: Largest block of logits, in bytes. Larger blocks make fewer passes over the head's gradient, and cost memory.
LOGITS_BYTES = {"cpu": 48 << 20, "cuda": 512 << 20}

#: Up to this many chunks the head's gradient is summed in the compute dtype. Each bf16 addition rounds once, by at
#: most 2^-9 of the sum so far, as adding one more micro-batch to `.grad` does; beyond, small parts would be lost.
NARROW_SUMS = 8


def cross_entropy_sum(model: nn.Module, batch: Batch, chunk: int | None = None) -> tuple[Tensor, int]:
    """Summed loss of a batch in nats, and how many tokens were trained.

    Args:
        model: has `hidden(inputs, documents=...)` and `output`, the head (any module from [*, D] to [*, V]).
        batch: inputs and labels [B, T] int64, labels[b, t] the token after inputs[b, t], or IGNORE;
            documents [B, T] or None.
        chunk: tokens whose logits are held at once; by default as many as LOGITS_BYTES allows.

    Returns:
        The sum as a float32 scalar on the model's device, 0 where every label is IGNORE, and the count. Divide by
        the count of the whole optimizer step, not of this batch (FAULTS A20).
    """
    hidden = model.hidden(batch.inputs, documents=batch.documents).flatten(0, 1)  # [B*T, D]
    labels = batch.labels.flatten()
    kept = (labels != IGNORE).nonzero().squeeze(1)
    if len(kept) < len(labels):
        hidden, labels = hidden[kept], labels[kept]
    return head_loss_sum(model.output, hidden, labels, chunk), len(labels)


def head_loss_sum(head: nn.Module, hidden: Tensor, labels: Tensor, chunk: int | None = None) -> Tensor:
    """Summed cross entropy of `head(hidden)` [N, V] against labels [N], chunk by chunk; a float32 scalar.

    A plain bias-free `nn.Linear` takes the fast path; any other head (quantized, with an adapter, sharded) is run
    as it is on each chunk and run again in backward.
    """
    if type(head) is nn.Linear and head.bias is None and type(head.weight) is nn.Parameter and not _has_hooks(head):
        return _LinearCrossEntropy.apply(hidden, head.weight, labels, chunk)
    chunk = chunk or _default_chunk(hidden, getattr(head, "out_features", None) or head(hidden[:1]).shape[-1])

    def chunk_loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden).float(), labels, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for h, y in zip(hidden.split(chunk), labels.split(chunk)):
        if len(y):  # split() of nothing gives one empty piece
            total = total + (checkpoint(chunk_loss, h, y, use_reentrant=False) if torch.is_grad_enabled() else chunk_loss(h, y))
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of hidden @ weight.T; gradients are formed in forward."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        with torch.autocast(kind, enabled=False):
            want_hidden, want_weight = ctx.needs_input_grad[:2]
            total, grad_hidden, grad_weight = _loss_and_gradients(
                hidden.to(dtype), weight.to(dtype), labels, chunk, want_hidden, want_weight
            )
        # Rounded here, once, to the dtypes autograd expects.
        ctx.save_for_backward(
            grad_hidden if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight if grad_weight is None else grad_weight.to(weight.dtype),
        )
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In place, because the head's gradient is large; autograd's version counter refuses a second backward.
        return *(None if g is None else g.mul_(grad) for g in ctx.saved_tensors), None, None


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None, want_hidden: bool, want_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss sum, and its gradients by hidden [N, D] and by weight [V, D], those that are wanted."""
    chunks = hidden.split(chunk or _default_chunk(hidden, len(weight)))
    narrow = len(chunks) <= NARROW_SUMS or weight.dtype == torch.float32
    total = hidden.new_zeros((), dtype=torch.float32)
    grad_hidden = torch.empty_like(hidden) if want_hidden else None
    grad_weight = None
    if want_weight:
        grad_weight = torch.empty_like(weight) if narrow else torch.zeros_like(weight, dtype=torch.float32)
    logits = hidden.new_empty(len(chunks[0]), len(weight))  # one buffer: fresh memory costs a page fault every 4 KB
    start = 0
    for h in chunks:
        stop = start + len(h)
        z = torch.mm(h, weight.T, out=logits[: len(h)])
        total += _softmax_minus_onehot_(z, labels[start:stop], want_hidden or want_weight)
        if want_hidden:
            torch.mm(z, weight, out=grad_hidden[start:stop])
        if want_weight and narrow:
            grad_weight.addmm_(z.T, h, beta=float(start > 0))  # the first chunk writes, the others add
        elif want_weight:
            for rows, z_rows in zip(grad_weight.split(4096), z.split(4096, dim=1)):  # small enough to stay in cache
                rows += z_rows.T @ h
        start = stop
    return total, grad_hidden, grad_weight


def _softmax_minus_onehot_(logits: Tensor, labels: Tensor, gradient: bool) -> Tensor:
    """Loss sum of logits [C, V], float32 inside; if `gradient`, logits become softmax(logits) - onehot(labels).

    Works on few rows at a time, so that their float32 probabilities stay in cache.
    """
    total = logits.new_zeros((), dtype=torch.float32)
    elements = (1 << 20) * torch.get_num_threads() if logits.device.type == "cpu" else 1 << 26
    rows = max(1, elements // logits.shape[1])
    for z, label in zip(logits.split(rows), labels.split(rows)):
        label = label[:, None]
        at_label = z.gather(1, label).float()  # [rows, 1]
        p = torch.softmax(z, dim=-1, dtype=torch.float32)
        # log of the sum from the largest entry, the one whose probability (>= 1/V) can't underflow
        logsumexp = z.amax(-1, keepdim=True).float() - p.amax(-1, keepdim=True).log()
        total += (logsumexp - at_label).sum()
        if gradient:
            p.scatter_(1, label, (at_label - logsumexp).expm1())  # p_label - 1, exact also where p_label rounds to 1
            z.copy_(p)
    return total


def _default_chunk(hidden: Tensor, vocabulary: int) -> int:
    """Tokens a chunk: within LOGITS_BYTES, and all chunks about equal."""
    most = max(64, LOGITS_BYTES.get(hidden.device.type, LOGITS_BYTES["cuda"]) // (vocabulary * hidden.element_size()))
    chunks = max(1, -(-len(hidden) // most))
    return max(1, -(-len(hidden) // chunks))


def _has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward (the fast path never calls it)."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
