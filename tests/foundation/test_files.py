"""Files: devices, pipes, bombs and paths that the system refuses end in a sentence; nothing is replaced that is no file."""

import dataclasses
import errno
import os
import re
import stat
import threading
from pathlib import Path

import pytest

from perfmodel.foundation import files
from perfmodel.foundation.errors import InputError, RunError, shown, whole_number
from perfmodel.foundation.files import parse_yaml, read_text, read_yaml
from perfmodel.foundation.resources import check_can_be_written, resource_dir, write_atomically
from perfmodel.frameworks.profile import load_profile, profile_text
from perfmodel.hardware.fabric import Link, NetworkTier, Topology
from perfmodel.hardware.reader import calibrations_for, load_calibration, load_chip, load_cluster
from perfmodel.parallel.algebra.rules import load_rule_set
from perfmodel.parallel.layout import divisors
from perfmodel.parallel.plan_file import read_plan
from perfmodel.uncertainty.residuals import load_residuals
from perfmodel.validation.cases import read_cases
from perfmodel.workload.models import load_model

YAML_READERS = [load_cluster, load_chip, load_calibration, load_profile, load_rule_set, load_residuals, read_plan]


# --- writing ------------------------------------------------------------------------------------------------------


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.yaml"
    link.symlink_to("real/plan.yaml")
    write_atomically(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "real" / "plan.yaml").read_text() == "new"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="cannot be written"):  # the pipe has no reader: no wait
        write_atomically(pipe, "x")
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    while True:
        try:
            write_atomically(pipe, "row\n")
            break
        except InputError:
            continue
    reader.join(10)
    assert read == ["row\n"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_and_a_stream_are_written_to(tmp_path, capfd, monkeypatch):
    device = tmp_path / "null"
    device.symlink_to(os.devnull)
    write_atomically(device, "x")
    assert stat.S_ISCHR(device.stat().st_mode)
    assert device.is_symlink()
    monkeypatch.setattr("perfmodel.foundation.resources.os.replace", None)  # nothing is renamed onto what leads to the stream
    write_atomically("/dev/stdout", "row\n")
    assert capfd.readouterr().out == "row\n"


def test_a_name_of_the_longest_kind_can_be_written(tmp_path):
    path = tmp_path / ("n" * 255)
    check_can_be_written(path, "save")
    write_atomically(path, "x")
    assert path.read_text() == "x"


@pytest.mark.parametrize(
    "path, rule",
    [
        ("no/where.yaml", "folder does not exist"),
        ("n" * 256, "File name too long"),
        ("/" + "d/" * 3000 + "x.yaml", "File name too long"),
        (".", "is a folder"),
        ("a\0b.yaml", "null byte"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, path, rule):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rule):
        check_can_be_written(path, "save")


def test_a_removed_working_folder_is_reported(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InputError, match="working folder was removed"):
        check_can_be_written("plan.yaml", "save")
    with pytest.raises(InputError, match="no such file"):
        load_cluster("x.yaml")


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(monkeypatch):
    """A folder that may not be entered, for whoever runs the tests."""

    def refusing(call):
        def refuse(path, *arguments, **options):
            if str(path).startswith("locked"):
                raise PermissionError(errno.EACCES, "Permission denied")
            return call(path, *arguments, **options)

        return refuse

    for name in ("stat", "scandir", "open"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))


@pytest.mark.parametrize("load", YAML_READERS)
@pytest.mark.parametrize("name", ["x" * 5000 + ".yaml", "d/" * 3000 + "x.yaml", "a\0b.yaml", "folder.yaml", "/dev/zero"])
def test_a_path_that_cannot_be_read_is_one_sentence(load, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(InputError) as error:
        load(name)
    assert len(str(error.value)) < 700
    assert str(error.value).isprintable()


@pytest.mark.parametrize("load", YAML_READERS)
def test_a_folder_that_may_not_be_entered_is_one_sentence(load, refused):
    with pytest.raises(InputError):
        load("locked/x.yaml")
    assert calibrations_for("h100-sxm-80gb", [Path("locked/calibrations"), Path("d/" * 3000)])


@pytest.mark.parametrize(
    "load", [load_model, lambda path: list(read_cases(path)), lambda path: read_text(path, "text")], ids=["model", "cases", "text"]
)
def test_inputs_without_an_end_are_refused(load, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PIPE_PATIENCE", 0.05)
    with pytest.raises(InputError, match="device"):
        load("/dev/zero")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(InputError, match="nothing came out of this pipe"):
        load(tmp_path / "pipe.json")


def test_a_pipe_with_a_writer_is_read(tmp_path):
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text('{"id": "a"}\n'))
    writer.start()
    assert [case.id for case in read_cases(pipe)] == ["a"]
    writer.join(10)


def test_a_large_file_and_a_long_line_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1000)
    path = tmp_path / "config.json"
    path.write_text("[" * 2000)
    with pytest.raises(InputError, match="larger than"):
        load_model(path)
    cases = tmp_path / "cases.jsonl"
    cases.write_bytes(b'{"id": "a"}\n{"id": "b", "x": "' + b"x" * 2**21 + b'"}\n{"id": "c"}\n')
    read = list(read_cases(cases))
    assert [(case.id, bool(case.reason)) for case in read] == [("a", False), ("line-2", True), ("c", False)]
    monkeypatch.setattr("perfmodel.validation.cases.MAX_FILE_BYTES", 1000)
    with pytest.raises(InputError, match="larger than"):
        list(read_cases(cases))


# --- YAML ---------------------------------------------------------------------------------------------------------

MERGES = "m0: &m0 {a: 1, b: 2}\n" + "".join(f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 10)}]}}\n" for i in range(1, 11))
ALIASES = "notes:\n- &z0 [1, 1]\n" + "".join(f"- &z{i} [{', '.join([f'*z{i - 1}'] * 10)}]\n" for i in range(1, 10)) + "num_chips: *z8\n"
CHAIN = "notes:\n- &z0 [1, 1]\n" + "".join(f"- &z{i} [*z{i - 1}]\n" for i in range(1, 5000))


@pytest.mark.parametrize("text", [MERGES, ALIASES, CHAIN], ids=["merge keys", "aliases", "depth"])
def test_a_bomb_of_aliases_is_refused_unexpanded(text):
    with pytest.raises(InputError, match="aliases stand for more than 1,000,000 values or 64 levels; write the values out"):
        parse_yaml(text, where="x.yaml")


def test_aliases_of_an_ordinary_file_are_read_and_those_of_themselves_are_not():
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\n", where="x") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}}
    with pytest.raises(InputError, match="stands for a value that holds it"):
        parse_yaml("a: &a [*a]\n", where="x")


@pytest.mark.parametrize("number", ["1" * 5000, "0x" + "f" * 5000, "-0b" + "1" * 5000])
def test_a_number_of_thousands_of_digits_is_refused(number):
    with pytest.raises(InputError, match=r"line 1: a number of 5,00\d digits"):
        parse_yaml(f"num_chips: {number}", where="x")


@pytest.mark.parametrize("load", YAML_READERS[:-1])
@pytest.mark.parametrize(
    "text", ["a: 1\na: 2\n", "a: " + "[" * 100_000, "- " * 50_000, "a: !!timestamp x", "a: !!bool x", 'a: !!int ""', "a: .nan\n"]
)
def test_every_yaml_file_goes_through_the_strict_reader(load, text, tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(InputError):
        load(path)
    if text.startswith("a: 1"):
        with pytest.raises(InputError, match="line 2: a: given twice"):
            load(path)


# --- messages -----------------------------------------------------------------------------------------------------


def test_messages_are_fit_for_a_terminal():
    message = str(RunError("profile=" + "x" * 5000 + "\x1b[31m\a: not known\nuse one of a"))
    assert len(message) < 400
    assert "\x1b" not in message
    assert message.endswith(": not known\nuse one of a")
    assert len(str(InputError("word " * 5000))) < 4100


def test_values_are_shown_briefly():
    deep: list = []
    for _ in range(10_000):
        deep = [deep, deep]
    assert len(shown(deep)) <= 80
    assert len(shown("x" * 5000)) <= 80
    assert shown(10**5000) == "a int too long to show"
    assert [whole_number(text) for text in ("12", " 7 ", "x", "-1", "²", "1" * 5000)] == [12, 7, None, None, None, None]


def test_a_file_with_several_faults_says_them_all(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: c\nchip: h100-sxm-80gb\nnum_chips: 8 chips\ntiers: [{name: a, sise: 8, bandwidth: 450, topology: ring}]\n")
    with pytest.raises(InputError) as error:
        load_cluster(path)
    for part in (
        "faults: (1) tiers.0.sise: unknown field; did you mean 'size'?",
        "num_chips='8 chips': must be a whole number; write a number without quotes or unit",
        "chips_per_node, tiers.0.size, tiers.0.latency: required field is missing; add it",
        "tiers.0.bandwidth=450: a bandwidth needs its unit; write '450 GB/s'",
    ):
        assert part in str(error.value)


def test_a_path_read_as_yaml_keeps_its_sentence(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_yaml(tmp_path / "none.yaml")


def test_every_quantity_and_every_field_of_a_calibration_is_named_at_once(tmp_path):
    text = (resource_dir("hardware_specs") / "clusters" / "dgx-h100.yaml").read_text(encoding="utf-8")
    path = tmp_path / "c.yaml"
    path.write_text(text.replace("450 GB/s", "450 Gb/s").replace("2.7 us", "2.7"), encoding="utf-8")
    with pytest.raises(InputError, match=r"2 faults: \(1\) tiers.0.bandwidth='450 Gb/s': .*\(2\) tiers.1.latency=2.7: .*write '2.7 us'"):
        load_cluster(path)
    path.write_text("name: c\nchips: h100\nsoftwrae: x\nmatmul: {bf16: {peak_fraction: 0.5 %, floor_time: 3}}\n", encoding="utf-8")
    with pytest.raises(InputError) as error:
        load_calibration(path)
    for part in (
        "softwrae: unknown field",
        "calibration.source",
        "chips=",
        "peak_fraction=",
        "floor_time=3: a time needs its unit; write '3 us'",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        ("450 GB/s", "1e-300 B/s", "tiers.0.bandwidth=1e-300: must be positive, 1 B/s at least"),
        ("450 GB/s", "5e-324 B/s", "tiers.0.bandwidth=.*must be positive"),
        ("600 ns", "1e300 s", "tiers.0.latency='1e300 s': no time is so large"),
    ],
)
def test_an_absurd_rate_is_refused_where_it_is_read(tmp_path, old, new, sentence):
    text = (resource_dir("hardware_specs") / "clusters" / "dgx-h100.yaml").read_text(encoding="utf-8")
    path = tmp_path / "c.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=sentence):
        load_cluster(path)


@pytest.mark.parametrize(
    "old, new",
    [
        ("tp_backward_overlap_fraction: ", "tp_backward_overlap_fraction: 3 #"),
        ("tp_overlap_fraction: ", "tp_overlap_fraction: .nan #"),
        ("logit_bytes: ", "logit_bytes: .inf #"),
        ("host_launch_time: ", "host_launch_time: 1" + "0" * 39 + " #"),
        ("matmul_rate_fraction: ", "matmul_rate_fraction: 0 #"),
    ],
)
def test_numbers_of_a_profile_have_bounds(tmp_path, old, new):
    text = profile_text(load_profile("megatron"))
    assert f"\n{old}" in text
    path = tmp_path / "p.yaml"
    path.write_text(text.replace(f"\n{old}", f"\n{new}"), encoding="utf-8")
    with pytest.raises(InputError, match=old.strip(": ") + ".*must be a number from"):
        load_profile(path)


def test_sizes_near_the_largest_are_answered_at_once():
    assert divisors(2**31 - 1) == (1, 2**31 - 1)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert len(divisors(2**31 - 2)) == 192
    with pytest.raises(InputError, match="num_hidden_layers=1000000000: must be 4,096 at most"):
        dataclasses.replace(load_model("gpt2"), num_hidden_layers=10**9)
    with pytest.raises(InputError, match="may hold 131,072 chips at most"):
        NetworkTier(
            name="t", topology=Topology.TORUS, size=2**31, torus_shape=(2**31,), link=Link(bandwidth=1e9, pair_bandwidth=1e9, latency=0)
        )


def test_a_config_and_a_plan_with_several_faults_say_them_all(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "hidden_size": "4096", "num_hidden_layers": 2.5, "vocab_size": 100, "intermediate_size": 8}')
    with pytest.raises(InputError, match=r"4 faults: .*hidden_size=.*num_attention_heads.*: is missing.*num_hidden_layers="):
        load_model(config)
    plan = tmp_path / "plan.yaml"
    plan.write_text("schema_version: 1\njob: {model: gpt2, global_batch: x, seq_len: 8}\nlayout: {tp: [2]}\nnum_chips: 8\nzro: 1\n")
    with pytest.raises(InputError) as error:
        read_plan(plan)
    for part in ("zro: unknown field", "did you mean", "job.global_batch='x'", "layout.tp=[2]", "cluster: required field is missing"):
        assert part in str(error.value)


def test_fields_with_one_fault_are_named_together(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: mine\n" + "".join(f"unknown_{index}: 1\n" for index in range(200)))
    with pytest.raises(InputError) as error:
        load_cluster(path)
    assert re.search(r"unknown_\d and 19\d more: unknown field", str(error.value))
    assert "provenance: required field is missing; write read, recalled, mixed or measured" in str(error.value)
    message = error.value.full
    assert "unknown_7 and 192 more: unknown field" in message
    assert "chip, num_chips, chips_per_node, tiers: required field is missing; add it" in message
    assert "provenance: required field is missing; write read, recalled, mixed or measured" in message
    assert len(message) < 900


def test_a_text_is_parsed_once_and_each_caller_has_a_mapping_of_its_own():
    first = parse_yaml("a: {b: [1]}", where="here")
    first["a"]["b"].append(2)
    assert parse_yaml("a: {b: [1]}", where="here") == {"a": {"b": [1]}}
