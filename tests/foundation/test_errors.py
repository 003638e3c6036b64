import os
import stat

import pytest

from perfmodel.foundation import resources
from perfmodel.foundation.errors import InputError, PerfModelError, RunError, bad_field, suggest
from perfmodel.foundation.files import dump_yaml, parse_yaml, read_yaml
from perfmodel.foundation.resources import resource_dir, write_atomically


def test_bad_input_is_also_a_value_error():
    assert issubclass(InputError, PerfModelError)
    assert issubclass(InputError, ValueError)
    assert not issubclass(RunError, ValueError)


@pytest.mark.parametrize(
    "value, remedy",
    [
        ("h100", "; did you mean 'h100-sxm' or 'h200-sxm' or 'a10g'?"),
        ("H100-SXM", "; did you mean 'h100-sxm' or 'h200-sxm'?"),
        ("zzzz", "; use one of a10g, h100-sxm, h200-sxm"),
    ],
)
def test_the_nearest_names_are_suggested(value, remedy):
    assert suggest(value, ["h100-sxm", "h200-sxm", "a10g"]) == remedy


def test_many_unlike_names_are_cut_short():
    assert suggest("??", [f"name{i:02}" for i in range(20)]).endswith("name11 and 8 more")
    assert suggest("x", []) == ""


def test_a_message_is_one_sentence_and_short():
    assert str(bad_field("tp", 6, "must divide num_attention_heads=32", "use 1, 2 or 4")) == (
        "tp=6: must divide num_attention_heads=32; use 1, 2 or 4"
    )
    long = str(bad_field("tp\r", "x\n\x00\u2028" * 500, "must be a count"))
    assert len(long) < 120
    assert long.isprintable()


LONG = {
    "names": (
        "chip=x: unknown chip; use one of " + ", ".join(f"name{i:02}" for i in range(40)) + " and 40 more (a path works too)",
        ("chip=x: unknown chip; use one of name00, name01, ", " more (a path works too)"),
    ),
    "fields": (
        ", ".join(f"field_{i}" for i in range(60)) + ": unknown field; remove them",
        ("field_0, field_1", " more: unknown field; remove them"),
    ),
    "an aside": ("tp=3: must divide 8 (" + "why " * 60 + "); use 2", ("tp=3: must divide 8; use 2",)),
    "clauses": ("tp=3: must divide 8; " + "; ".join(["because of this"] * 20) + "; use 2", ("tp=3: must divide 8; because", "; use 2")),
    "a value": ("tp=" + "3 " * 300 + ": must be a number; write 2", ("tp=3 3 3", "; write 2")),
    "a value at the end": (
        "module=x: its forward fails on these inputs: RuntimeError: " + "words " * 40 + "; call it with others (inputs=float32[2,9])",
        ("module=x: its forward fails", "; call it with others (inputs=float32[2,9])"),
    ),
}


@pytest.mark.parametrize("case", LONG)
def test_a_long_message_keeps_the_field_the_rule_and_the_remedy(case):
    sentence, parts = LONG[case]
    error = InputError(sentence)
    assert len(str(error)) <= 200 < len(sentence)
    assert str(error).startswith(parts[0])
    assert str(error).endswith(parts[-1])
    assert error.full == sentence


def test_of_several_faults_each_is_a_sentence():
    keys = "; ".join(f"({i}) key_{i}=list: must be a whole number; write 8" for i in range(1, 11))
    many = f"c.yaml: 30 faults: {keys}; and 20 more"
    assert str(InputError(many)) == many
    words = "; ".join(f"({i}) key_{i}={'word ' * 100}: must be short; cut it" for i in range(1, 11))
    error = InputError(f"c.yaml: 10 faults: {words}")
    assert len(str(error)) < 4 * 200 + 50
    assert str(error).startswith("c.yaml: 10 faults: (1) key_1=word word")
    assert "; cut it; (2) key_2=word word" in str(error)
    assert str(error).endswith("; and 5 more")
    assert error.full == f"c.yaml: 10 faults: {words}"[:4000] + "..."
    missing = "; ".join(f"--{name}: is missing; give {'words ' * 12}(or as --more)" for name in ("model", "cluster", "chips"))
    assert str(InputError(missing)) == missing


def test_a_path_does_not_take_the_place_of_a_sentence():
    path = "/home/user/" + "folder/" * 12 + "c.yaml"
    rule = "vendor: required field is missing; add it, with the name of the maker of the chip as its data sheet has it"
    assert str(InputError(f"{path}: {rule}")) == f"{path}: {rule}"


def test_a_file_is_written_whole_with_ordinary_permissions(tmp_path):
    path = tmp_path / "plan.yaml"
    write_atomically(path, "name: é\n")
    assert path.read_text(encoding="utf-8") == "name: é\n"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o640)
    write_atomically(path, "name: b\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = tmp_path / "plan.yaml"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resources.os, failing, full)
    with pytest.raises(InputError, match="No space left on device"):
        write_atomically(path, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.yaml"]
    assert path.read_text() == "old"


def test_a_missing_folder_and_unwritable_text_are_input_errors(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path / "missing" / "plan.yaml", "x")
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path / "plan.yaml", "\ud800")
    assert list(tmp_path.iterdir()) == []


def test_shipped_folders_are_found_and_a_broken_installation_says_so():
    assert (resource_dir("hardware_specs") / "chips").is_dir()
    with pytest.raises(PerfModelError, match="install perfmodel again"):
        resource_dir("nonexistent")


@pytest.mark.parametrize(
    "text, rule",
    [
        ("a: 1\na: 2\n", "line 2: a: given twice"),
        ("a: {b: 1, b: 2}", "given twice"),
        ("a: [1", "not valid YAML"),
        ("- 1\n- 2\n", "mapping of fields"),
        ("", "mapping of fields"),
        ("a: !!python/object/apply:os.system [true]", "not valid YAML"),
        ("a: 2020-13-45", "not valid YAML"),
        ("? [1, 2]\n: 3", "not valid YAML"),
        ("a: " + "[" * 5000, "nested more than"),
        ("a: " + "- " * 5000, "not valid YAML|nested"),
        ("- " * 5000 + "1", "nested more than"),
        ("a: *missing", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("a: b: c", "line 1: not valid YAML"),
    ],
)
def test_bad_yaml_is_one_sentence(text, rule):
    with pytest.raises(InputError, match=rule) as caught:
        parse_yaml(text, where="my.yaml")
    assert str(caught.value).startswith("my.yaml: ")
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_input_errors(tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: \xff\xfe")
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * (9 * 2**20))
    for path, rule in [(binary, "UTF-8"), (huge, "larger than"), (tmp_path, "cannot be read"), (tmp_path / "no", "cannot be read")]:
        with pytest.raises(InputError, match=rule):
            read_yaml(path)


def test_dumped_yaml_reads_back_in_order():
    data = {"z": "400 Gbit/s", "a": [1, 2.5, True], "é": {"x": "1e3", "y": "yes"}}
    again = parse_yaml(dump_yaml(data), where="text")
    assert again == data
    assert list(again) == list(data)
