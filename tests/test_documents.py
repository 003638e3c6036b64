"""Every command and every program in README.md and docs/ runs, and prints what the page shows."""

import sys

import pytest

from tests.documents import PAGES, ROOT, Block, Runner, agrees, examples, rewritten
from tests.marks import mostly_slow


@pytest.mark.parametrize("page", mostly_slow(page for page in PAGES if examples((ROOT / page).read_text(encoding="utf-8"))))
@pytest.mark.timeout(600)
def test_page_shows_what_its_examples_print(page, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    runner = Runner()
    try:
        for example in examples((ROOT / page).read_text(encoding="utf-8")):
            printed = runner.run(example.block)
            if example.shown is not None:
                assert agrees(example.shown, printed), (
                    f"{page}, line {example.block.first}: prints\n{printed}\n`python -m tests.documents {page}` writes it"
                )
    finally:
        sys.modules.pop("mynets", None)


def _shown(text, info="text"):
    return Block(info=info, text=text, first=0, last=0)


def test_what_differs_is_noticed():
    assert agrees(
        _shown("12 plans evaluated in 124 ms, 2.5 million a second; 3 fit\n"), "12 plans evaluated in 1.2 s, 9 thousand a second; 3 fit\n"
    )
    assert agrees(_shown("a\n", info="text first=1"), "a\nb\n")
    assert not agrees(_shown("a\n"), "a\nb\n")
    assert not agrees(_shown("12 plans evaluated in 124 ms; 3 fit\n"), "13 plans evaluated in 124 ms; 3 fit\n")


def test_a_page_is_written_again_with_what_it_prints():
    page = "```python\nx = 1\nprint(x)\n```\n\n```text\nold\n```\nend\n"
    assert rewritten(page) == page.replace("old", "1")


def test_readme_names_the_framework_in_its_first_example():
    first = examples((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    assert 'profile="' in first.block.text
