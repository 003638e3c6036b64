"""Every command and every program in README.md and docs/ runs, and prints what the page shows."""

import json
import re
import sys

import pytest

from lab.page_figures import FIGURES_FILE, SERVING_PAGE, TRAINING_PAGE, serving_figures, training_figures
from perfmodel.foundation.errors import InputError
from tests.documents import PAGES, ROOT, Block, Runner, agrees, examples, figures_of, page_figures, rewritten, with_figures
from tests.marks import mostly_slow

#: Figures that a page has to quote from the data file.
QUOTED = {
    "docs/trust.md": (
        *("unseen_coverage", "unseen_coverage_worst", "known_coverage", "few_coverage_3"),
        *("few_mean_0", "few_mean_3", "unseen_choice_mean", "choice_best_of_three"),
        *("reliability_mean", "reliability_worst", "reliability_sure", "reliability_runs"),
        *("false_positives", "out_of_memory_runs", "false_negatives", "fitting_runs"),
    ),
    "docs/fitting.md": tuple(f"few_mean_{given}" for given in (0, 1, 3, 10)),
    "README.md": ("unseen_mean", "unseen_groups", "known_mean", "choice_mean", "false_positives", "tpot_median_unseen_model"),
}


@pytest.mark.parametrize("page", mostly_slow(page for page in PAGES if examples((ROOT / page).read_text(encoding="utf-8"))))
@pytest.mark.timeout(600)
@pytest.mark.slow
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
    assert agrees(_shown("b\nc\n", info="text lines=2-3"), "a\nb\nc\nd\n")
    assert not agrees(_shown("a\n"), "a\nb\n")
    assert not agrees(_shown("12 plans evaluated in 124 ms; 3 fit\n"), "13 plans evaluated in 124 ms; 3 fit\n")


def test_a_page_is_written_again_with_what_it_prints():
    page = "```python\nx = 1\nprint(x)\n```\n\n```text\nold\n```\nend\n"
    assert rewritten(page) == page.replace("old", "1")


def test_readme_names_the_framework_in_its_first_example():
    first = next(example for example in examples((ROOT / "README.md").read_text(encoding="utf-8")) if example.block.info == "python")
    assert 'profile="' in first.block.text


def test_figures_of_pages_are_those_of_the_data_file():
    figures = page_figures()
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text == with_figures(text, figures), f"{page}: run `python -m tests.documents --figures {page}`"


def test_the_data_file_has_the_figures_of_the_accuracy_pages():
    training, serving = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in (TRAINING_PAGE, SERVING_PAGE))
    stored = json.loads((ROOT / "docs" / FIGURES_FILE).read_text(encoding="utf-8"))
    assert stored == {"training": training_figures(training), "serving": serving_figures(serving)}
    assert stored["training"]["unseen_coverage"] in re.findall(r"\*\*mean over groups\*\*.*? (\d+)% \|", training)


def test_a_table_that_is_missing_is_one_sentence():
    with pytest.raises(InputError, match="make accuracy"):
        training_figures("# Accuracy\n")


def test_a_stale_figure_is_replaced():
    page = "error <!--figure:unseen_mean-->9.2<!--/figure--> %"
    assert with_figures(page, {"unseen_mean": "8.1"}) == page.replace("9.2", "8.1")


@pytest.mark.parametrize(("page", "names"), QUOTED.items())
def test_pages_quote_how_predictions_were_checked(page, names):
    assert set(names) <= set(figures_of((ROOT / page).read_text(encoding="utf-8")))
