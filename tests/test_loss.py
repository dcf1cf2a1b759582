"""Chunked cross entropy against the plain formula: values, gradients, every head, every chunk size, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from llamalab import loss as loss_module
from llamalab.config import ModelArgs
from llamalab.data import Batch
from llamalab.loss import IGNORE, cross_entropy_sum, head_loss_sum
from llamalab.model import Transformer


def case(tokens=37, dim=24, vocabulary=101, dtype=torch.float32, scale=1.0):
    g = torch.Generator().manual_seed(0)
    head = nn.Linear(dim, vocabulary, bias=False, dtype=dtype)
    head.weight.data.copy_(torch.randn(vocabulary, dim, generator=g) * scale)
    hidden = torch.randn(tokens, dim, generator=g).to(dtype).requires_grad_()
    return head, hidden, torch.randint(0, vocabulary, (tokens,), generator=g)


def reference(head, hidden, labels):
    """Value and gradients in float64 from the same (possibly rounded) inputs."""
    h, w = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    value = F.cross_entropy(h @ w.T, labels, reduction="sum")
    value.backward()
    return value.detach(), h.grad, w.grad


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


class Wrapped(nn.Linear):
    """A head that is not a plain nn.Linear: takes the general path."""


def wrap(head):
    other = Wrapped(head.in_features, head.out_features, bias=False, dtype=head.weight.dtype)
    other.weight.data.copy_(head.weight.data)
    return other


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 38, None])  # 37 chunks take the float32 sum, 8 or fewer the narrow one
def test_value_and_gradients_for_every_chunk(chunk, general):
    head, hidden, labels = case()
    value, grad_hidden, grad_weight = reference(head, hidden, labels)
    head = wrap(head) if general else head
    got = head_loss_sum(head, hidden, labels, chunk)
    assert got.dtype == torch.float32 and got.shape == ()
    (got / 7).backward()  # a divisor, as a training step has
    # float32 against float64: sums of ~100 products, each good to 2^-24 = 6e-8
    assert relative(got.detach(), value) < 1e-6
    assert relative(hidden.grad * 7, grad_hidden) < 1e-6
    assert relative(head.weight.grad * 7, grad_weight) < 1e-6


@pytest.mark.parametrize("chunk", [3, 12, None])
def test_bf16_is_as_good_as_the_plain_formula_in_bf16(chunk):
    head, hidden, labels = case(tokens=96, dim=64, vocabulary=301, dtype=torch.bfloat16, scale=0.3)
    value, grad_hidden, grad_weight = reference(head, hidden, labels)
    plain_hidden, plain_weight = hidden.detach().clone().requires_grad_(), head.weight.detach().clone().requires_grad_()
    F.cross_entropy((plain_hidden @ plain_weight.T).float(), labels, reduction="sum").backward()
    got = head_loss_sum(head, hidden, labels, chunk)
    got.backward()
    assert relative(got.detach(), value) < 2**-9  # logits are bf16: half a unit in the last place of 8 bits
    # the same roundings as the plain formula; 8 partial sums of the weight's gradient round up to 8 times, not once
    assert relative(hidden.grad, grad_hidden) < 1.1 * relative(plain_hidden.grad, grad_hidden)
    assert relative(head.weight.grad, grad_weight) < 2.0 * relative(plain_weight.grad, grad_weight)


def test_many_chunks_do_not_lose_small_contributions():
    # 600 tokens, each adding the same gradient to row 1: a bf16 running sum stops growing at 256 additions
    head = nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    head.weight.data.zero_()
    hidden = torch.ones(600, 1, dtype=torch.bfloat16)
    head_loss_sum(head, hidden, torch.zeros(600, dtype=torch.long), chunk=1).backward()
    assert head.weight.grad.tolist() == [[-300.0], [300.0]]  # 600 * 0.5, exact in bf16


def test_confident_and_extreme_logits():
    head = nn.Linear(2, 3, bias=False)
    head.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]))
    hidden = torch.tensor([[300.0, 0.0], [300.0, 0.0], [20.0, 0.0]], requires_grad=True)
    labels = torch.tensor([0, 1, 0])  # certain and right, certain and wrong by 300 nats, nearly certain
    value, grad_hidden, grad_weight = reference(head, hidden, labels)
    got = head_loss_sum(head, hidden, labels)
    got.backward()
    assert relative(got.detach(), value) < 1e-6  # float32 epsilon 1.2e-7, a few operations
    assert relative(hidden.grad, grad_hidden) < 1e-6 and relative(head.weight.grad, grad_weight) < 1e-6
    near = head_loss_sum(head, hidden[2:].detach(), labels[2:])
    assert near.item() == pytest.approx(2.06e-9, abs=1e-6)  # z - logsumexp of 20: float32 spacing there is 1.9e-6


def test_gradient_of_a_nearly_certain_label_survives_bf16():
    head = nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    head.weight.data.copy_(torch.tensor([[8.0], [0.0]]))
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    head_loss_sum(head, hidden, torch.tensor([0])).backward()
    # 1 - p = 3.354e-4; p itself rounds to 1 in bf16. 2^-8: one bf16 rounding
    assert head.weight.grad[0, 0].item() == pytest.approx(-3.3535e-4, rel=2**-8)


def test_ignored_labels_are_dropped_and_counted():
    torch.manual_seed(0)
    model = Transformer(ModelArgs.from_name("tiny-tied")).init_weights(0)
    model.setup_caches(2, 16, training=True)
    idx = torch.randint(0, 97, (2, 12))
    labels = torch.randint(0, 97, (2, 12))
    labels[0, :5] = IGNORE
    labels[1, 7] = IGNORE
    total, count = cross_entropy_sum(model, Batch(idx, labels))
    assert count == 24 - 6
    expected = F.cross_entropy(model(idx).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)  # float32 sums in another order
    grads = torch.autograd.grad(total, model.parameters())
    for got, want in zip(grads, torch.autograd.grad(expected, model.parameters())):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)  # float32, through two layers


@pytest.mark.parametrize("general", [False, True])
def test_nothing_to_train_is_zero_not_nan(general):
    head, hidden, labels = case(tokens=0)
    head = wrap(head) if general else head
    total = head_loss_sum(head, hidden, labels)
    assert total.item() == 0.0
    if not general:  # the general path has nothing to differentiate
        total.backward()
        assert head.weight.grad.abs().sum() == 0


def test_documents_reach_the_model():
    model = Transformer(ModelArgs.from_name("tiny")).init_weights(0)
    model.setup_caches(1, 16, training=True)
    idx, labels = torch.randint(0, 97, (1, 9)), torch.randint(0, 97, (1, 9))
    documents = torch.tensor([[0] * 4 + [1] * 5])
    together, _ = cross_entropy_sum(model, Batch(idx, labels, documents))
    alone = sum(cross_entropy_sum(model, Batch(idx[:, s], labels[:, s]))[0] for s in (slice(0, 4), slice(4, 9)))
    assert together.item() == pytest.approx(alone.item(), rel=1e-6)  # float32 sums in another order


@pytest.mark.parametrize("general", [False, True])
def test_autocast_keeps_float32_gradients(general):
    head, hidden, labels = case(tokens=40, dim=32, vocabulary=101)
    value, grad_hidden, grad_weight = reference(head, hidden, labels)
    head = wrap(head) if general else head
    with torch.autocast("cpu", torch.bfloat16):
        got = head_loss_sum(head, hidden, labels, chunk=16)
    got.backward()
    assert got.dtype == torch.float32 and hidden.grad.dtype == head.weight.grad.dtype == torch.float32
    for mine, exact in ((got.detach(), value), (hidden.grad, grad_hidden), (head.weight.grad, grad_weight)):
        assert relative(mine, exact) < 2**-6  # bf16 inputs (2^-9 each) and logits of size ~5 (2^-7 absolute)


@pytest.mark.parametrize("freeze_head", [False, True])
def test_only_wanted_gradients_are_formed(freeze_head):
    head, hidden, labels = case()
    _, grad_hidden, grad_weight = reference(head, hidden, labels)
    head.weight.requires_grad_(not freeze_head)
    hidden = hidden if freeze_head else hidden.detach()
    head_loss_sum(head, hidden, labels).backward()
    if freeze_head:
        assert head.weight.grad is None and relative(hidden.grad, grad_hidden) < 1e-6
    else:
        assert relative(head.weight.grad, grad_weight) < 1e-6


def test_no_grad_gives_the_same_value():
    head, hidden, labels = case()
    with torch.no_grad():
        quiet = head_loss_sum(head, hidden, labels, chunk=10)
    assert torch.equal(quiet, head_loss_sum(head, hidden, labels, chunk=10).detach()) and not quiet.requires_grad


def test_second_backward_is_refused():
    head, hidden, labels = case()
    total = head_loss_sum(head, hidden, labels)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        total.backward()


def test_hooked_head_is_called():
    head, hidden, labels = case()
    calls = []
    head.register_forward_hook(lambda *_: calls.append(1))
    head_loss_sum(head, hidden, labels)
    assert calls


@pytest.mark.parametrize("general", [False, True])
def test_all_logits_are_never_held(general, monkeypatch):
    """No tensor of N x V elements is made, forward or backward."""
    monkeypatch.setitem(loss_module.LOGITS_BYTES, "cpu", 64 * 301 * 4)
    head, hidden, labels = case(tokens=1024, dim=8, vocabulary=301)
    head = wrap(head) if general else head
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                largest = max(largest, t.numel() if isinstance(t, torch.Tensor) else 0)
            return out

    with Watch():
        head_loss_sum(head, hidden, labels).backward()
    assert 64 * 301 <= largest < 1024 * 301 / 8
