"""Pages from templates."""

import re
from pathlib import Path

import pytest

import lab.pages
from lab.pages import page, table

FOLDER = Path(lab.pages.__file__).parent


def test_sections_are_filled_and_stand_in_the_given_order():
    text = page("accuracy", [("not_scored", {}), ("paragraph", {"text": "some words"})])
    assert text == "## Not scored\n\nsome words.\n"


def test_paragraphs_have_one_width_and_tables_stay():
    rows = table(("a", "b"), [("x", "1")])
    text = page("accuracy", [("paragraph", {"text": "word " * 60}), ("assumed", {"table": rows})], wraps=True)
    assert rows in text
    assert max(map(len, text.splitlines())) <= 140
    assert rows.splitlines()[1] == "| --- | ---: |"


def test_a_value_that_is_missing_is_an_error():
    with pytest.raises(KeyError):
        page("accuracy", [("paragraph", {})])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.md")), ids=lambda path: path.stem)
def test_each_section_of_a_template_has_a_name_of_its_own(path):
    names = re.findall(r"^@@ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert names
    assert len(names) == len(set(names))
