"""The wording check finds every replaced word, vague names and long sentences, and passes plain English."""

import json

import pytest

from tests import vocabulary
from tests.vocabulary import (
    RULES,
    Passage,
    findings_of,
    markdown_passages,
    notebook_passages,
    python_passages,
    yaml_comment_findings,
    yaml_passages,
)


def _texts_of(text):
    return [finding.text for finding in findings_of(Passage(text=text, line=1), "page.md")]


@pytest.mark.parametrize(
    "text",
    [
        "a framework that is a stranger",
        "Nobody fitted it",
        "runs of one's own",
        "the step rests on a table",
        "on an equal footing",
        "told to fit",
        "the profile tells it",
        "stated by nobody, said twice",
        "believed to be heard",
        "ranks dealt out",
        "cut into tiles",
        "experts beside attention",
        "what the step hangs on",
        "in doubt",
        "what shows under compute",
        "gathers that hide under compute",
        "workers of two kinds",
        "habits of a framework",
        "what bounds an operator",
        "as many as ranks",
        "so many times",
    ],
)
def test_replaced_words_are_found(text):
    assert _texts_of(text)


def test_every_rule_has_a_pattern_that_matches_and_a_reason():
    assert all(rule.pattern and rule.replacement and rule.reason for rule in RULES)


@pytest.mark.parametrize(
    "text",
    [
        "based on the data sheet",
        "the keys `rests_on` and `doubts`, the file `habits.yaml`",
        "besides, a believable cut-off",
        "exposed communication under 10 ms",
        "the grade of trust",
        "many plans",
    ],
)
def test_plain_english_and_names_in_backticks_pass(text):
    assert not _texts_of(text)


def test_a_sentence_over_forty_words_is_found():
    words = "word " * 39
    assert not _texts_of(f"{words}end.")
    assert _texts_of(f"{words}more end.")
    assert not _texts_of(f"{words}end. Another {words}")
    assert _texts_of(f"{words}end; another {words}")


def test_sources_of_data_files_may_be_long_citations():
    citation = Passage(text="word " * 41, line=1)
    assert findings_of(citation, "page.md")
    assert not findings_of(citation, "chip.yaml")


def test_a_finding_gives_file_line_word_and_replacement():
    (finding,) = findings_of(Passage(text="one\ntwo\nthree beside four", line=5), "page.md")
    assert str(finding).startswith("page.md:7: beside -> in addition to")


def test_a_phrase_over_a_line_break_is_found():
    assert _texts_of("the step rests\non a table")


def test_pages_give_prose_and_cells_without_fenced_blocks():
    page = "# Title\n\ntext\nmore\n\n```text\nbeside\n```\n- item\n\n| a | b |\n|---|---|\n"
    assert [(passage.text, passage.line) for passage in markdown_passages(page)] == [
        ("Title", 1),
        ("text\nmore", 3),
        ("item", 9),
        ("a", 11),
        ("b", 11),
        ("---", 12),
        ("---", 12),
    ]


def test_notebooks_give_their_markdown_cells():
    cells = [{"cell_type": "code", "source": ["x = 'beside it'"]}, {"cell_type": "markdown", "source": ["one\n", "two"]}]
    assert [(passage.text, passage.line) for passage in notebook_passages(json.dumps({"cells": cells}))] == [("one\ntwo", 2)]


def test_yaml_gives_texts_and_no_keys():
    assert [(passage.text, passage.line) for passage in yaml_passages("a b: 1\nname: x\nsource: the data sheet\n")] == [
        ("the data sheet", 3)
    ]


def test_python_gives_literals_with_a_space_and_docstrings_of_commands_only():
    program = '"""Module text."""\ndef verb(x):\n    """Help text."""\n    raise ValueError(f"tp={x}: too " "large", {"rests_on": 1})\n'
    assert [passage.text for passage in python_passages(program)] == ["tp=x: too large"]
    assert [passage.text for passage in python_passages(program, docstrings=True)] == ["Help text.", "tp=x: too large"]
    assert not list(python_passages('NAMES = "beside told".split()\nPATTERN = re.compile("told (.*)")\n'))


def test_the_check_exits_with_one_where_it_finds_something(tmp_path, monkeypatch, capsys):
    (tmp_path / "README.md").write_text("ranks are dealt out\n", encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n", encoding="utf-8")
    monkeypatch.setattr(vocabulary, "ROOT", tmp_path)
    assert vocabulary.main([]) == 1
    assert capsys.readouterr().out.startswith("README.md:1: dealt -> ")
    (tmp_path / "README.md").write_text("ranks are assigned\n", encoding="utf-8")
    assert vocabulary.main([]) == 0


@pytest.mark.parametrize(
    "opening", ["Of one layer.", "What a step takes.", "Those of a plan.", "Whose weights these are.", "How far it is off."]
)
def test_a_docstring_names_what_it_describes(opening):
    text = f'def f():\n    """{opening}"""\n\n\nclass C:\n    """Costs. What they are follows."""\n'
    (finding,) = vocabulary.opening_findings(text, "a.py")
    assert finding.line == 2
    assert finding.text.startswith("docstring begins with")


def test_files_of_tests_are_checked_without_their_literals(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        '"""Ranks beside others."""\n\n\ndef test_told():\n    found = "told to fit"\n    assert found  # said\n', encoding="utf-8"
    )
    monkeypatch.setattr(vocabulary, "ROOT", tmp_path)
    assert vocabulary.checked_files() == ["tests/test_a.py"]
    assert sorted((finding.line, finding.text) for finding in vocabulary.check(["tests/test_a.py"])) == [
        (1, "beside"),
        (4, 'name "test_told"'),
        (5, 'name "found"'),
        (6, "said"),
    ]


@pytest.mark.parametrize(
    "program",
    [
        "for each in (): pass",
        "def f(own): pass",
        "[place for place in ()]",
        "class Stranger: pass",
        "def f(): whole = 1",
        "by_habit = {}",
    ],
)
def test_vague_names_are_found(program):
    assert len(list(vocabulary.name_findings(program, "a.py"))) == 1


def test_keys_of_files_of_frameworks_are_names():
    assert not list(vocabulary.name_findings("zero_beside_axes = prefill_context_beside = ()", "a.py"))


def test_comments_of_yaml_files_are_checked():
    text = "# Of each chip: what nobody measured\nname: a # the rate rests on it\nsource: 'issue #12'\n"
    findings = [(finding.line, finding.text) for finding in yaml_comment_findings(text, "x.yaml")]
    assert findings == [(1, "nobody"), (1, 'comment begins with "Of"'), (2, "rests on")]
