"""Sequences with states in the place of keys: cached steps in double precision, slots that change hands, bytes that are kept."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from perfmodel.cost.serving.memory import cache_shape  # noqa: E402
from perfmodel.execute.layers import scans  # noqa: E402
from perfmodel.execute.serving.cache import PagedCache, StateCache  # noqa: E402
from perfmodel.execute.serving.decoder import build_decoder  # noqa: E402
from perfmodel.execute.uniform import recurrent  # noqa: E402
from perfmodel.foundation.errors import RunError  # noqa: E402
from perfmodel.workload.layer_specs import LayerSpec  # noqa: E402
from tests.execute.jobs import DELTA, STATE, tiny  # noqa: E402
from tests.execute.serving.test_decoder import run, some_tokens, uncached  # noqa: E402

#: Without experts, whose routers compute in float32.
HYBRIDS = {
    "mamba": tiny("hybrid"),
    "delta": tiny(
        delta=DELTA, attention_gate=True, qk_norm=True,
        kinds=(LayerSpec(name="layer", count=3, mixer="delta", turn="t"), LayerSpec(name="attention_layer", count=1, turn="t")),
    ),
    "mamba alone": tiny(mamba=STATE, kinds=(LayerSpec(name="layer", count=4, mixer="mamba"),)),
}  # fmt: skip
LENGTHS = (37, 21, 30)


@pytest.fixture
def in_doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def served(config, dtype=torch.float64):
    decoder = build_decoder(config, num_blocks=10, num_sequences=4, dtype=dtype)
    return decoder, decoder.cache


def relative_error(values, expected):
    return float((values - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("config", HYBRIDS.values(), ids=HYBRIDS)
def test_cached_steps_are_the_uncached_pass_in_double_precision(config, in_doubles):
    """Prompts whole and in chunks of any length, of one position too, and token by token; slots that lie apart; one that was another's."""
    tokens = some_tokens(config, LENGTHS)
    expected, (decoder, cache) = uncached(config, tokens), served(config)
    for sequence, length in ((7, 30), (0, 37), (8, 9), (1, 21)):
        cache.reserve(sequence, length)
    run(decoder, (7, 0, tokens[2]), (8, 0, tokens[1][:9]))
    for sequence in (7, 8):  # their slots are free, and not empty
        cache.release(sequence)
    cache.reserve(2, 30)
    assert cache.states.of([0, 1, 2]).index is not None
    assert relative_error(run(decoder, (0, 0, tokens[0][:29]))[0], expected[0][28]) < 1e-9
    for at, (start, stop) in enumerate(((0, 1), (1, 10), (10, 18)), 29):
        logits = run(decoder, (1, start, tokens[1][start:stop]), (0, at, [tokens[0][at]]))
        assert relative_error(logits[0], expected[0][at]) < 1e-9
        assert relative_error(logits[1], expected[1][stop - 1]) < 1e-9
    run(decoder, (2, 0, tokens[2][:25]))
    for step in range(3):
        at = (32 + step, 18 + step, 25 + step)
        logits = run(decoder, *((i, at[i], [tokens[i][at[i]]]) for i in range(3)))
        for i in range(3):
            assert relative_error(logits[i], expected[i][at[i]]) < 1e-9


@pytest.mark.parametrize("forgets", ["causal_conv_on", "delta_scan_on"])
def test_a_decoder_that_forgets_what_it_kept_differs(forgets, monkeypatch):
    config = HYBRIDS["delta"]
    tokens = some_tokens(config, (20,))
    expected, (decoder, cache) = uncached(config, tokens)[0], served(config, torch.float32)
    mixers = [layer.attention for layer in decoder.layers.values() if isinstance(layer.attention, recurrent.DeltaMixer)]
    scan, convolution = scans.delta_scan, scans.causal_conv_on
    for mixer in mixers if forgets == "delta_scan_on" else ():
        forgetful = replace(scan, onward=lambda x, steps, parameters, state, chunk: scan.onward(x, steps, parameters, state.zero_(), chunk))
        monkeypatch.setattr(mixer, "scan", forgetful)
    if forgets == "causal_conv_on":
        name = "perfmodel.execute.serving.attention.causal_conv_on"
        monkeypatch.setattr(name, lambda x, weights, last: convolution(x, weights, torch.zeros_like(last)))
    cache.reserve(0, 20)
    assert relative_error(run(decoder, (0, 0, tokens[0][:12]))[0], expected[11]) < 1e-5
    assert relative_error(run(decoder, (0, 12, tokens[0][12:]))[0], expected[19]) > 1e-3


def test_one_position_is_a_chunk_of_one():
    """A scan over positions one by one, each from the state that the last one left, is the scan over all of them."""
    generator = torch.Generator().manual_seed(3)
    x, steps, state = (torch.randn(size, generator=generator) for size in ((2, 11, 4, 20), (2, 11, 4, 4), (2, 4, 2, 6, 4)))
    parameters = [torch.randn(4, 2, generator=generator) for _ in range(2)]
    together, single = state.clone(), state.clone()
    y = scans.delta_scan.onward(x, steps, parameters, together, 4)
    one_by_one = [scans.delta_scan.onward(x[:, at : at + 1], steps[:, at : at + 1], parameters, single, 1) for at in range(11)]
    torch.testing.assert_close(torch.cat(one_by_one, 1), y)
    torch.testing.assert_close(single, together)
    assert not torch.equal(single, state)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("config", HYBRIDS.values(), ids=HYBRIDS)
def test_bytes_kept_are_those_that_serving_predicts(config, tp):
    """In 16 bits: states in float32, what the convolution read last in the model's dtype."""
    cache = PagedCache(config, 6, num_sequences=3, tp=tp, dtype=torch.bfloat16)
    for sequence, tokens in enumerate((16, 40)):
        cache.reserve(sequence, tokens)
    kept = cache_shape(config)
    of_tokens = (kept.tokens_bytes(tokens, tp=tp, kv_heads=4, cache_bytes=2.0) for tokens in (16, 48))
    assert cache.bytes_held == sum(of_tokens)
    assert cache.num_bytes == 6 * cache.block_bytes + 3 * cache.states.slot_bytes
    assert cache.states.slot_bytes == kept.state / tp


def test_states_in_32_bits_by_hand():
    """Mamba-2: 8 heads of 4 entries with a state of 6, 3 inputs of 32 + 2 x 4 x 6 channels. Delta: 8 of 6 x 4; of 2 x 24 + 32 channels."""
    caches = {name: StateCache(config, [name.split()[0]], 1, tp=1, dtype=torch.bfloat16, device="cpu") for name, config in HYBRIDS.items()}
    assert caches["mamba"].slot_bytes == 4 * 8 * 4 * 6 + 2 * 3 * (32 + 48)
    assert caches["delta"].slot_bytes == 4 * 8 * 6 * 4 + 2 * 3 * (48 + 32)


def test_a_cache_without_a_free_slot_reserves_nothing():
    cache = PagedCache(replace(HYBRIDS["mamba alone"]), 8, num_sequences=1)
    cache.reserve(0, 4)
    assert not cache.has_capacity(4)
    with pytest.raises(RunError, match="none of the 1 slots for states is free"):
        cache.reserve(1, 4)
    assert 1 not in cache.tables
    cache.release(0)
    assert cache.has_capacity(4)
