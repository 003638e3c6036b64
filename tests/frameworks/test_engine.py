"""User-defined engines: impossible values are refused with their field."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import list_engines, load_engine, version_of
from perfmodel.frameworks.engine_formats import EngineFormat, formats_on
from perfmodel.hardware.reader import load_chip
from perfmodel.workload.quantization import QUANTIZATIONS, has_units


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"activation_factor": (3.0,)}, r"activation_factor=\(3.0,\): must be four factors"),
        ({"graph_sizes": (4, 2)}, r"graph_sizes=\(4, 2\): must be batches from 1"),
        ({"graph_sizes": ()}, r"graph_sizes=\(\): must be batches from 1"),
        ({"floor_fraction": 7.0}, "floor_fraction=7.0: must lie in 0..1; correct the engine"),
        ({"prefill_context": "all"}, "prefill_context='?all'?: must be one of any, latent, none"),
        ({"prefill_context_beside": ("tp",)}, "prefill_context_beside=.*: must be of pp, attention_dp"),
    ],
)
def test_what_an_engine_cannot_be_is_refused(wrong, sentence):
    with pytest.raises(InputError, match=sentence):
        load_engine("vllm").having(**wrong)


def test_a_user_defined_engine_states_what_it_shares(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("base: vllm\nname: mine\nversion: '1'\nprefill_context: any\nprefill_context_since: ''\nprefill_context_beside: [pp]\n")
    engine = load_engine(file)
    assert (engine.runs.prefill_context, engine.runs.prefill_context_beside, engine.runs.prefill_context_since) == ("any", ("pp",), "")
    assert engine.runs.has_decode_context


def test_versions_do_what_they_did():
    """Samples sorted from 0.11.1 to 0.16; graphs counted since 0.17; no version: as the last does."""
    vllm = load_engine("vllm")
    seen = {text: vllm.at(version_of(text)) for text in ("vllm 0.10.2", "vllm 0.11.0", "vllm 0.12.0", "vllm 0.16.0", "vllm 0.18.0", "vllm")}
    assert [estimate.memory.sampler_bytes for estimate in seen.values()] == [14, 14, 38, 38, 14, 14]
    assert [estimate.memory.graph_bytes > 0 for estimate in seen.values()] == [False, False, False, False, True, True]
    assert seen["vllm"] is vllm
    assert load_engine("sglang").at((0, 5, 8)) is load_engine("sglang")


@pytest.mark.parametrize(
    ("text", "version"), [("trtllm 1.2.0rc6.post3", (1, 2, 0)), ("TensorRT-LLM v0.17 (in-flight)", (0, 17)), ("vllm nan", ()), ("", ())]
)
def test_a_version_is_read_from_words(text, version):
    assert version_of(text) == version


def test_an_engine_file_that_changed_is_read_again(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("base: vllm\nname: mine\nversion: '1'\nmax_batch: 10\n")
    assert load_engine(file).scheduling.max_batch == 10
    file.write_text("base: vllm\nname: mine\nversion: '1'\nmax_batch: 2000\n")
    assert load_engine(file).scheduling.max_batch == 2000


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b", "no/such/file.yaml", "vlm"])
def test_a_name_that_no_engine_has_is_refused(name):
    with pytest.raises(InputError, match="perfmodel engines"):
        load_engine(name)


@pytest.mark.parametrize("name", list_engines())
def test_a_shipped_engine_runs_16_bits_on_every_chip_and_what_its_file_says(name):
    engine = load_engine(name)
    for chip in (load_chip("a100-sxm-80gb"), load_chip("h100-sxm-80gb"), load_chip("b200-180gb"), load_chip("mi300x-192gb")):
        runs = formats_on(engine.kernels.formats, chip)
        assert {"bf16", "fp16"} <= set(runs)
        for quantization in runs:
            assert has_units(QUANTIZATIONS[quantization], chip.peak_flop_rate)


def test_formats_that_a_file_cannot_have_are_refused():
    for wrong, sentence in (({"format": "fp9"}, "formats=fp9"), ({"format": "fp8", "units": ("fp9",)}, "formats=fp9")):
        with pytest.raises(InputError, match=sentence):
            EngineFormat(**wrong)


@pytest.mark.parametrize(
    ("engine", "chip", "gib", "batch", "tokens", "reserved"),
    [
        ("vllm", "h100-sxm-80gb", 80, 1024, 8192, 0),
        ("vllm", "a100-sxm-80gb", 80, 256, 2048, 0),
        ("vllm", "l40s-48gb", 48, 256, 2048, 0),
        ("sglang", "h100-sxm-80gb", 80, 1024, 8192, 10),
        ("sglang", "rtx4090-24gb", 24, 1024, 2048, 0),
    ],
)
def test_defaults_of_an_engine_follow_the_chip(engine, chip, gib, batch, tokens, reserved):
    on_chip = load_engine(engine).on(chip, gib * 2**30)
    assert (on_chip.scheduling.max_batch, on_chip.scheduling.max_tokens) == (batch, tokens)
    assert on_chip.memory.least_reserve_bytes == reserved * 2**30
    assert on_chip.on(chip, gib * 2**30) == on_chip


def test_sglang_captures_few_graphs_on_small_chips():
    assert load_engine("sglang").on("l4-24gb", 24 * 2**30).scheduling.graph_sizes[-1] == 24


def test_short_names_and_capitals_name_an_engine():
    assert load_engine("trtllm") is load_engine("TensorRT-LLM") is load_engine("tensorrt-llm")
