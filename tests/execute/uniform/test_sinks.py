"""Attention with a score of each head to which no key belongs."""

import pytest

torch = pytest.importorskip("torch")

from perfmodel.execute.layers.attention import attention, causal_attention  # noqa: E402


@pytest.mark.parametrize("queries, window", [(12, 0), (12, 5), (6, 4)])
def test_sinks_take_their_share_of_the_softmax(queries, window):
    shapes = (2, 4, queries, 8), (2, 2, 12, 8), (2, 2, 12, 8), (4,)
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).requires_grad_() for i, shape in enumerate(shapes)]
    q, k, v, sinks = inputs
    out = causal_attention(q, k, v, sinks=sinks, window=window)
    query, key = torch.arange(12 - queries, 12)[:, None], torch.arange(12)
    seen = (key <= query) & (key > query - (window or 12))
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) * 8**-0.5).masked_fill(~seen, -torch.inf)
    shares = torch.cat((scores, sinks.view(1, 4, 1, 1).expand(2, 4, queries, 1)), -1).softmax(-1)[..., :-1]
    expected = shares @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(attention(q, k, v, mask=seen, sinks=sinks.view(1, -1, 1, 1)), expected)  # as a GPU has it
    gradient = torch.randn_like(out)
    gradients, wanted = (torch.autograd.grad(result, inputs, gradient) for result in (out, expected))
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-5)
