import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.foundation.dtypes import Dtype, itemsize
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.units import (
    QuantityKind,
    exact_quantity,
    format_bandwidth,
    format_bytes,
    format_count,
    format_flop_rate,
    format_power,
    format_time,
    format_traffic,
    parse_quantity,
)


@pytest.mark.parametrize(
    "text, kind, value",
    [
        ("3.35 TB/s", "bandwidth", 3.35e12),
        ("400 Gbit/s", "bandwidth", 50e9),
        ("1 GiB/s", "bandwidth", 2.0**30),
        ("80 GB", "bytes", 80e9),
        ("80 GiB", "bytes", 80 * 2.0**30),
        ("81559 MiB", "bytes", 81559 * 2.0**20),
        ("989.4 TFLOP/s", "flop_rate", 989.4e12),
        ("180 GFLOP/s", "flop_rate", 180e9),
        ("2.7 us", "time", 2.7e-6),
        ("2.7 µs", "time", 2.7e-6),
        ("1e3 ms", "time", 1.0),
        ("2h", "time", 7200.0),
        ("700 W", "power", 700.0),
        ("2.99 USD/h", "price", 2.99),
        ("15T", "count", 15e12),
        (64, "count", 64.0),
        ("10%", "fraction", 0.1),
        (0.1, "fraction", 0.1),
        ("1_000 B", "bytes", 1000.0),
    ],
)
def test_a_quantity_is_its_si_value_to_the_bit(text, kind, value):
    assert parse_quantity(text, kind) == value


@pytest.mark.parametrize(
    "text, kind, rule",
    [
        ("400 Gb/s", "bandwidth", "write Gbit/s or GB/s"),
        ("400 Gbps", "bandwidth", "write Gbit/s or GB/s"),
        ("80 Gb", "bytes", "write Gbit or GB"),
        ("450 GB", "bandwidth", "did you mean 'GB/s'"),
        ("312 TFLOPS", "flop_rate", "did you mean 'TFLOP/s'"),
        ("312", "flop_rate", "needs its unit"),
        (312, "flop_rate", "needs its unit"),
        ("-1 s", "time", "never negative"),
        ("-0 s", "time", "never negative"),
        ("1e999 s", "time", "finite"),
        ("fast", "bandwidth", "a number and a unit"),
        ("", "time", "a number and a unit"),
        ("120%", "fraction", "0..1"),
        (True, "count", "must be a count"),
        (None, "bytes", "must be a bytes"),
        (math.nan, "count", "a number and a unit"),
        ("1 s", "duration", "unknown kind"),
    ],
)
def test_a_bad_quantity_names_field_rule_and_remedy(text, kind, rule):
    with pytest.raises(InputError, match=rule.replace(".", r"\.")) as caught:
        parse_quantity(text, kind, field="memory.bandwidth")
    if kind != "duration":
        assert str(caught.value).startswith("memory.bandwidth=")
    assert "\n" not in str(caught.value)


@given(value=st.floats(min_value=0, max_value=1e25), kind=st.sampled_from([kind for kind in QuantityKind if kind != "fraction"]))
def test_an_exact_quantity_reads_back_to_the_bit(value, kind):
    assert parse_quantity(exact_quantity(value, kind), kind) == value


@given(text=st.text(max_size=30), kind=st.sampled_from(list(QuantityKind)))
def test_any_text_is_a_quantity_or_an_input_error(text, kind):
    try:
        value = parse_quantity(text, kind)
    except InputError:
        return
    assert math.isfinite(value)
    assert value >= 0


def test_exact_quantities_read_well():
    assert exact_quantity(450e9, "bandwidth") == "450 GB/s"
    assert exact_quantity(600e-9, "time") == "600 ns"
    assert exact_quantity(80 * 2.0**30, "bytes") == "80 GiB"
    assert exact_quantity(500e6, "bytes") == "500 MB"


def test_printouts_have_three_digits_and_a_unit():
    assert format_time(0.01234) == "12.3 ms"
    assert format_time(0.9999) == "1 s"
    assert format_time(0.0) == "0 ns"
    assert format_bytes(80e9) == "74.5 GiB"
    assert format_traffic(80e9) == "80 GB"
    assert format_bandwidth(3.35e12) == "3.35 TB/s"
    assert format_flop_rate(989.4e12) == "989 TFLOP/s"
    assert format_power(700.0) == "700 W"
    assert format_count(8.03e9) == "8.03B"
    assert format_time(math.inf) == "inf ns"


def test_every_dtype_has_a_size():
    assert {dtype: itemsize(dtype) for dtype in (Dtype.TF32, Dtype.BF16, Dtype.FP4)} == {"tf32": 4, "bf16": 2, "fp4": 0.5}
    assert all(itemsize(dtype) > 0 for dtype in Dtype)
