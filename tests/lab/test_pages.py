"""Pages from templates."""

import re
from pathlib import Path

import pytest

import lab.pages
from lab.pages import page, table, values_on_page
from perfmodel.foundation.errors import InputError

FOLDER = Path(lab.pages.__file__).parent


def test_sections_are_filled_and_stand_in_the_given_order():
    text = page("accuracy", [("not_scored", {}), ("choice_table", {"name": "Some words", "table": "-", "worst": "none"})])
    assert text == "## Not scored\n\nSome words:\n\n-\n\nnone\n"


def test_paragraphs_have_one_width_and_tables_stay():
    rows = table(("a", "b"), [("x", "1")])
    text = page("accuracy", [("choice_table", {"name": "word " * 60, "table": rows, "worst": ""})], wraps=True)
    assert rows in text
    assert max(map(len, text.splitlines())) <= 140
    assert rows.splitlines()[1] == "| --- | ---: |"


def test_a_value_that_is_missing_is_an_error():
    with pytest.raises(KeyError):
        page("accuracy", [("assumed", {})])


def test_values_are_read_from_a_page_as_they_were_written():
    names = ("unseen_choice_mean", "unseen_choice_worst", "groups", "least_plans", "correlation")
    values = {name: str(number) for number, name in enumerate(names)}
    text = page("accuracy", [("not_scored", {}), ("unseen_choice", values)], wraps=True)
    assert values_on_page(text, "accuracy", "unseen_choice") == values
    with pytest.raises(InputError, match="the text of few_runs is missing"):
        values_on_page(text, "accuracy", "few_runs")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.md")), ids=lambda path: path.stem)
def test_each_section_of_a_template_has_a_name_of_its_own(path):
    names = re.findall(r"^@@ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert names
    assert len(names) == len(set(names))
