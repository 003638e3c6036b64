"""Mixers with a state as modules: their kernels compute, and derive, what definitions say, chunk by chunk."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from perfmodel.execute.layers import recurrence, scans  # noqa: E402
from perfmodel.execute.layers.norm import gated_norm  # noqa: E402
from perfmodel.execute.uniform import recurrent  # noqa: E402
from perfmodel.execute.uniform.sharding import Sharding  # noqa: E402
from tests.execute.jobs import tiny  # noqa: E402

MIXERS = {"mamba": (recurrent.MambaMixer, "nemotron"), "delta": (recurrent.DeltaMixer, "qwen3-next")}


def mixer_of(name):
    make, variant = MIXERS[name]
    mixer = make(tiny(variant), Sharding(), device="cpu").double()
    for number, parameter in enumerate(mixer.parameters()):
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(number))
    return mixer


def gated_norm_by_definition(x, gate, weight, *, width, gates_first):
    given = x * F.silu(gate) if gates_first else x
    normed = F.rms_norm(given.unflatten(-1, (-1, width)), (width,), None, 1e-6)
    scaled = (normed * (weight.unflatten(-1, (-1, width)) if weight.dim() > 1 else weight)).flatten(-2)
    return scaled if gates_first else scaled * F.silu(gate)


def by_definition(mixer, x):
    """The branch with plain torch: the whole sequence in one piece, no kernel."""
    groups = mixer.groups
    if isinstance(mixer, recurrent.MambaMixer):
        gate, mixed, steps = mixer.in_proj(x).unflatten(-1, (groups, -1)).split(mixer.pieces, -1)
        scan, names, norm = recurrence.state_scan, ("dt_bias", "A_log", "D"), mixer.mamba_norm.weight.unflatten(0, (groups, -1))
        form = dict(width=mixer.inner, gates_first=True)
    else:
        mixed, gate = mixer.in_proj_qkvz(x).unflatten(-1, (groups, -1)).split(mixer.pieces, -1)
        steps = mixer.in_proj_ba(x).unflatten(-1, (groups, -1))
        scan, names, norm = recurrence.delta_scan, ("dt_bias", "A_log"), mixer.delta_norm.weight
        form = dict(width=mixer.state[1], gates_first=False)
    conv = [parameter.unflatten(0, (groups, -1)) for parameter in mixer.conv.parameters()]
    padded = torch.cat((mixed.new_zeros(x.shape[0], conv[0].shape[-1] - 1, *mixed.shape[2:]), mixed), 1)
    mixed = recurrence.causal_conv(padded, conv[0], conv[1] if len(conv) > 1 else None)
    nothing = x.new_zeros(x.shape[0], groups, mixer.heads, *mixer.state)
    y, _ = scan(mixed, steps, nothing, *(getattr(mixer, name).unflatten(0, (groups, -1)) for name in names))
    return mixer.out_proj(gated_norm_by_definition(y, gate, norm, **form).flatten(2))


@pytest.mark.parametrize("length", [32, 21, 5])
@pytest.mark.parametrize("name", MIXERS)
def test_chunks_and_their_gradients_are_the_definition(name, length):
    """A sequence of whole chunks (of 8), one whose last chunk is short, one shorter than a chunk."""
    mixer = mixer_of(name)
    x = torch.randn(2, length, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).requires_grad_()
    inputs = [x, *mixer.parameters()]
    gradient = torch.randn(2, length, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    output, expected = mixer(x), by_definition(mixer, x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(torch.autograd.grad(output, inputs, gradient), torch.autograd.grad(expected, inputs, gradient))


def test_a_chunk_that_forgets_what_came_before_differs(monkeypatch):
    mixer, x = mixer_of("delta"), torch.randn(1, 16, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    right = by_definition(mixer, x)
    by_chunk = scans._by_chunk

    def forgetful(scan, *rest):
        return by_chunk(lambda inputs, steps, before, *parameters: scan(inputs, steps, torch.zeros_like(before), *parameters), *rest)

    monkeypatch.setattr(scans, "_by_chunk", forgetful)
    wrong = mixer(x)
    torch.testing.assert_close(wrong[:, :8], right[:, :8])
    assert not torch.allclose(wrong[:, 8:], right[:, 8:], rtol=1e-3)


def test_a_mixer_keeps_what_its_first_products_made_and_the_statistics():
    """Not the convolution's output nor the states: of bytes a position 8 for each of these entries."""
    mixer, x = mixer_of("delta"), torch.randn(2, 32, 64, dtype=torch.float64)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t) is None or t, lambda t: t):
        mixer(x)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in mixer.parameters()}
    sizes = sorted(tensor.untyped_storage().nbytes() // 8 // 64 for pointer, tensor in kept.items() if pointer not in parameters)
    projected, inner, heads = 4 * (2 * 6 + 2 * 8), 4 * 8, 8
    assert sizes == sorted([64, projected, 2 * heads, inner, inner, heads])  # x; qkvz; ba; the scan's output; the norm's; its statistics


def test_flop_of_a_scan_are_those_of_its_chunked_form():
    """Q G N + Q H P + 4 H P N a token (Dao and Gu, section 6), Q positions of a chunk; backward twice, and what it makes again."""
    q, g, h, p, n = 64, 2, 8, 16, 32
    states = torch.empty(3, 4, g, h // g, p, n)
    tokens = 3 * 4 * q
    forward = tokens * (q * g * n + q * h * p + 4 * h * p * n)
    _, flops = scans.PRODUCTS[torch.ops.perfmodel.state_scan]
    _, backward = scans.PRODUCTS[torch.ops.perfmodel.state_scan_backward]
    arguments = (None, None, (), states, q)
    assert flops(*arguments) == forward
    assert backward(None, *arguments) == 2 * forward + tokens * (q * g * n + 2 * h * p * n)


def test_a_gated_norms_gradients_are_those_of_torch():
    for width, gates_first, shape in ((12, True, (4, 12)), (4, False, (4,))):
        x, gate, weight = (
            torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).requires_grad_()
            for i, size in enumerate(((2, 5, 4, 12), (2, 5, 4, 12), shape))
        )
        plain = partial(gated_norm_by_definition, width=width, gates_first=gates_first)
        output, expected = gated_norm(x, gate, weight, width, gates_first), plain(x, gate, weight)
        gradient = torch.randn_like(output)
        torch.testing.assert_close(output, expected)
        pairs = (torch.autograd.grad(result, (x, gate, weight), gradient) for result in (output, expected))
        torch.testing.assert_close(*pairs)
