"""A chip from technology and budgets: what binds, what is refused, and that more is never slower."""

from dataclasses import fields, replace

import pytest
import yaml

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.hardware.construct import construct_chip
from perfmodel.hardware.reader import load_chip, load_cluster
from perfmodel.hardware.technology import ChipSpec, Technology, list_chip_specs, load_chip_spec, shipped_technology
from perfmodel.hardware.writer import save_chip

TECHNOLOGY = shipped_technology()
A100 = load_chip_spec("a100-spec")


def build(**changes):
    return construct_chip(replace(A100, **changes), TECHNOLOGY)


@pytest.mark.parametrize("section", [section.name for section in fields(Technology)])
def test_every_number_of_the_technology_files_has_a_source(section):
    for name, entry in getattr(TECHNOLOGY, section).items():
        assert {part.name for part in fields(entry)} - {"facts"} == set(entry.facts), name
        assert all(fact.source for fact in entry.facts.values()), name


def test_area_power_and_die_edge_bind():
    assert build().binding == "power"
    assert build(power=4000.0).binding == "area"
    crowded = build(memory=replace(A100.memory, stacks=12))
    assert (crowded.binding, crowded.stacks) == ("die edge", 6)
    assert crowded.chip.memory.bandwidth == pytest.approx(A100.memory.pin_bandwidth * 1024 * 6)


def test_the_parts_add_up_to_the_budgets():
    built = build()
    assert sum(built.areas.values()) == pytest.approx(A100.die_area)
    assert sum(built.powers.values()) == pytest.approx(A100.power)
    assert min(built.areas.values()) >= 0
    assert min(built.powers.values()) >= 0


@pytest.mark.parametrize(("field", "more"), [("die_area", 1.5), ("power", 1.5), ("num_dies", 2)])
def test_a_larger_budget_is_never_slower(field, more):
    larger = build(**{field: type(getattr(A100, field))(getattr(A100, field) * more)}).chip
    assert larger.flop_rate("bf16") >= build().chip.flop_rate("bf16")
    assert larger.memory.bandwidth >= build().chip.memory.bandwidth


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"logic": "n6"}, "^logic=n6: there is no data; .*n5.*[(]a technology file adds others[)]$"),
        ({"law": "moore"}, "^law=moore: there is no data"),
        ({"memory": replace(A100.memory, generation="hbm5")}, "^memory.generation=hbm5: there is no data; did you mean 'hbm"),
        ({"power": 60.0}, "^power=60 W: leaves no room for a unit next to memory, links; raise it"),
        ({"die_area": 200e-6}, "^die_area=200 mm2: leaves no room for a unit next to cache"),
        ({"die_area": 9e-6}, "^die_area=9 mm2: leaves no edge for a stack of hbm2e"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_sentence(changes, sentence):
    with pytest.raises(InputError, match=sentence):
        build(**changes)


def test_a_specification_is_read_wherever_a_chip_is(tmp_path):
    data = read_yaml(resource_dir("hardware_specs") / "chip_specs" / "a100-spec.yaml") | {"technology": "mine.yaml", "logic": "mine"}
    node = read_yaml(resource_dir("hardware_specs") / "technology" / "logic.yaml")["logic"]["n3"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"logic": {"mine": node}}))
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(data))
    assert load_chip(tmp_path / "spec.yaml").peak_flop_rate == build(logic="n3").chip.peak_flop_rate
    assert load_cluster("a100-spec", num_chips=16).chip == load_chip("a100-spec")


@pytest.mark.parametrize("name", list_chip_specs())
def test_a_saved_chip_is_the_same_chip(name, tmp_path):
    save_chip(load_chip(name), tmp_path / "chip.yaml")
    assert load_chip(tmp_path / "chip.yaml") == load_chip(name)
    assert isinstance(load_chip_spec(name), ChipSpec)
