"""The three attentions against each other and against float64."""

from __future__ import annotations

import pytest
import torch
from conftest import build_tiny

from llamalab.attention import LONGEST, attend, blocked_attention, document_positions, windowed_attention
from llamalab.surgery import block_attention_


def qkv(T: int, dtype=torch.float32, heads=(6, 2), D: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(T)
    return [torch.randn(2, h, T, D, generator=generator).to(dtype).requires_grad_() for h in (heads[0], heads[1], heads[1])]


def gradients(function, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    out = function(*tensors)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, weight)]


@pytest.mark.parametrize("T", [1, 127, 128, 129, 300])
def test_blocked_attention_is_attention(T):
    tensors = qkv(T)
    want = gradients(attend, [t.detach().double().requires_grad_() for t in tensors])
    for got, exact in zip(gradients(blocked_attention, tensors), want):
        # float32 sums of up to 200 terms of order one
        torch.testing.assert_close(got.double(), exact, atol=2e-5, rtol=1e-4)


def test_blocked_attention_in_bf16_is_no_worse_than_torchs():
    tensors = qkv(200, torch.bfloat16)
    exact = gradients(attend, [t.detach().double().requires_grad_() for t in tensors])
    ours, torchs = gradients(blocked_attention, tensors), gradients(attend, tensors)
    for a, b, want in zip(ours, torchs, exact):
        error, reference = ((x.double() - want).norm() / want.norm() for x in (a, b))
        assert error < 1.5 * reference + 2**-9, (error, reference)  # both round weights and results to bf16, 2^-9 each


def test_blocked_attention_hands_over_what_it_does_not_do():
    q, k, v = qkv(8)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    assert torch.equal(blocked_attention(q, k, v, mask), attend(q, k, v, mask))
    q, k, v = qkv(LONGEST + 1, heads=(1, 1), D=2)
    assert torch.equal(blocked_attention(q, k, v), attend(q, k, v))


def test_a_model_with_blocked_attention_gives_the_same_loss_and_gradients():
    idx = torch.randint(97, (2, 64), generator=torch.Generator().manual_seed(1))
    found = []
    for model in (build_tiny(), block_attention_(build_tiny())):
        loss = model(idx).logsumexp(-1).mean()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)  # float32 in another order of sums


@pytest.mark.parametrize("window", [1, 3, 8, 50])
@pytest.mark.parametrize("T", [8, 17, 48])
def test_window_in_blocks_is_the_masked_product(window, T):
    tensors = qkv(T)
    at = torch.arange(T)
    mask = (at <= at[:, None]) & (at > at[:, None] - window)
    want = gradients(lambda q, k, v: attend(q, k, v, mask), tensors)
    got = gradients(lambda q, k, v: windowed_attention(q, k, v, window), tensors)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)  # the same float32 sums over other block sizes


def test_positions_restart_with_each_document():
    documents = torch.tensor([[0, 0, 0, 4, 4, 1, 1, 1], [7, 7, 8, 7, 7, 7, 7, 9]])
    starts, positions = document_positions(documents)
    assert starts.tolist() == [[0, 0, 0, 3, 3, 5, 5, 5], [0, 0, 2, 3, 3, 3, 3, 7]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 0, 0, 1, 2, 3, 0]]
