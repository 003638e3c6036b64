"""Every command and every program in README.md and docs/ runs, and prints what the page shows."""

import re
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


def test_the_page_on_trust_has_the_figures_of_the_page_on_accuracy():
    trust, accuracy = (" ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split()) for name in ("trust.md", "accuracy.md"))
    stranger = re.search(r"\*\*mean over groups\*\* \| \| scatter [\d.]+ \| [\d.]+ \| (\d+)%", accuracy)
    groups = accuracy.partition("## A framework that nobody knows")[2].partition("**mean over groups**")[0]
    worst = min(int(share) for share in re.findall(r"\| (\d+)% \|", groups))
    left_out = re.search(r"## Intervals.*?\| all \| \d+ \| \d+% \| \d+% \| (\d+)% \|", accuracy)
    bins = re.search(
        r"[Oo]ff by ([\d.]+) points on average over runs, by (\d+) in the worst bin of 10 runs or more; of (\d+) of (\d+)", accuracy
    )
    fits = re.search(
        r": (\d+) of (\d+) runs of nanotron that ran out of memory are told to fit .*?, (\d+) of (\d+) that ran not to", accuracy
    )
    few = re.search(r"mean, each group weighing one \| \| ([\d.]+) % \| [\d.]+ % \| ([\d.]+) % .*? \| [\d.]+ % \| ([\d.]+) % \|", accuracy)
    chosen = re.search(r"all of them measured, is ([\d.]+) % slower\. .*?any of the group's \| ([\d.]+) % \|", accuracy)
    assert all((stranger, left_out, bins, fits, few, chosen))
    mean, most, sure, every = bins.groups()
    failed_but_fit, failed, ran_but_not, ran = fits.groups()
    for told in (
        f"{stranger[1]} % of the runs lie in the 80 % interval",
        f"{worst} % of the group where fewest do",
        f"their model left out: {left_out[1]} %",
        f"right to {most} points, over all runs to {mean} on average; {sure} of the runs",
        f"{every} runs of nanotron",
        f"took the mean error from {few[1]} to {few[2]} %",
        f"With three runs of one's own: {float(few[3]):.0f} %",
        f"is {chosen[2]} % slower than the best on average",
        f"is {chosen[1]} % slower: measure three",
        f"{'none' if failed_but_fit == '0' else failed_but_fit} of {failed} runs that ran out of memory",
        f"{ran_but_not} of {ran} that ran",
    ):
        assert told in trust, f"docs/trust.md should say: {told}"
