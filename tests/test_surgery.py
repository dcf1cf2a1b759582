"""Replacing and wrapping layers leaves names and numbers alone."""

from __future__ import annotations

import pytest
import torch
from conftest import build_tiny
from torch import nn

from llamalab.surgery import block_attention_, checkpoint_blocks_, compile_blocks_, linears, split_qkv, swap_linears


def loss_and_gradients(model: nn.Module) -> list[torch.Tensor]:
    idx = torch.randint(97, (2, 33), generator=torch.Generator().manual_seed(1))
    loss = model(idx).logsumexp(-1).mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def test_swap_names_what_it_keeps():
    model = build_tiny()
    kept = swap_linears(model, lambda name, linear: nn.Identity() if name.endswith("w1") else None)
    assert isinstance(model.layers[1].feed_forward.w1, nn.Identity)
    assert "output" in kept and "layers.0.attention.wqkv" in kept and len(kept) == 1 + 2 * 4
    assert len(list(linears(model))) == len(kept)


@pytest.mark.parametrize("overrides", [{}, {"qkv_bias": True}], ids=str)
def test_split_qkv_shares_the_rows(overrides):
    attention = build_tiny(**overrides).layers[0].attention
    x = torch.randn(3, 64)
    parts = split_qkv(attention)
    # three narrow products instead of one wide: the same float32 sums, blocked otherwise
    torch.testing.assert_close(torch.cat([part(x) for part in parts], dim=-1), attention.wqkv(x), atol=1e-6, rtol=1e-5)
    assert parts[0].weight.data_ptr() == attention.wqkv.weight.data_ptr()


def test_checkpointing_changes_no_number_and_no_name():
    plain, wrapped = build_tiny(), checkpoint_blocks_(build_tiny())
    assert list(plain.state_dict()) == list(wrapped.state_dict())
    for a, b in zip(loss_and_gradients(plain), loss_and_gradients(wrapped)):
        assert torch.equal(a, b)


def test_checkpointing_keeps_only_the_inputs_of_blocks():
    def kept(model: nn.Module) -> int:
        sizes = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            sizes[t.data_ptr()] = t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(torch.zeros(2, 64, dtype=torch.long)).sum()
        return sum(sizes.values())

    assert kept(checkpoint_blocks_(build_tiny(n_layer=4))) < 0.5 * kept(build_tiny(n_layer=4))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_blocks_give_the_same_numbers_under_the_same_names(checkpointed):
    plain, compiled = build_tiny(), block_attention_(build_tiny())
    if checkpointed:
        checkpoint_blocks_(compiled)
    compile_blocks_(compiled)
    for a, b in zip(loss_and_gradients(plain), loss_and_gradients(compiled)):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)  # float32 with sums in another order
    assert list(plain.state_dict()) == list(compiled.state_dict())
