"""The page in a real browser: choose, search, compare, bad input, links, keyboard, width."""

from urllib.parse import quote, urlencode

import pytest

from tests.web.conftest import JOB
from tests.web.test_endpoints import CONFIG, SMALL, TRAINER

pytestmark = pytest.mark.slow

PREDICTED = "document.querySelector('#verdict').textContent.includes('a step') && !document.querySelector('#verdict.stale')"


@pytest.fixture
def show(page, server):
    """Open a state and wait for its prediction."""

    def run(job=SMALL, *, fragment=""):
        page.send("Emulation.clearDeviceMetricsOverride")
        page.open("about:blank?")
        page.open(f"{server.url}{'?' + urlencode(job) if job else ''}{fragment}")
        page.wait(PREDICTED)
        return page

    yield run
    assert page.problems == []
    assert {url.split("/")[2] for url in page.requests if url.startswith("http")} <= {server.url.split("/")[2]}


def step_time(page):
    return page.value("answer.step_time")


def test_the_first_page_is_predicted_and_searched(show):
    page = show({})
    page.wait("document.querySelector('#plans table')")
    assert "Fits" in page.text("#verdict")
    assert page.value("document.querySelectorAll('#plans tbody tr').length") == 10
    assert "plans evaluated" in page.text("#search-state")


def test_a_slider_gives_the_numbers_of_predict_and_a_link(show, post):
    page = show(JOB)
    page.value("{const e = document.getElementById('tp'); e.value = 2; e.dispatchEvent(new Event('input')); }")
    page.wait(f"answer.plan.layout.tp === 4 && {PREDICTED}")
    assert step_time(page) == post("predict", {**JOB, "tp": 4})[1]["step_time"]
    assert page.value("document.getElementById('tp').getAttribute('aria-valuetext')") == "4"
    link = page.value("location.href")
    assert "tp=4" in link
    before = page.text("#cards")
    page.open("about:blank?")
    page.open(link)
    page.wait(PREDICTED)
    assert page.text("#cards") == before


def test_choices_change_the_job(show, post):
    page = show(JOB)
    page.choose("model", "meta-llama/Llama-3.1-8B")
    page.choose("recompute", "full")
    page.choose("seq_len-exact", "8k")
    page.wait(f"answer.plan.job.seq_len === 8192 && answer.plan.recompute === 'full' && {PREDICTED}")
    asked = {**JOB, "model": "meta-llama/Llama-3.1-8B", "recompute": "full", "seq_len": "8k"}
    assert step_time(page) == post("predict", asked)[1]["step_time"]


def test_every_best_plan_can_be_used(show):
    page = show({name: value for name, value in JOB.items() if name not in ("tp", "zero")})
    page.wait("result && document.querySelector('#plans table')")
    for number in range(0, 10, 3):
        page.click(f"#plans tbody tr:nth-child({number + 1}) button")
        page.wait(f"Math.abs(answer.step_time / result.plans[{number}].step_time - 1) < 1e-9 && {PREDICTED}")
        assert page.value("answer.plan_hash") == page.value(f"result.plans[{number}].plan_hash")


def test_two_plans_are_compared(show):
    page = show(JOB)
    first = step_time(page)
    page.click("#keep")
    page.choose("zero", "3")
    page.wait(f"answer.plan.zero === 3 && document.querySelector('#comparison table') && {PREDICTED}")
    change = 100 * (step_time(page) / first - 1)
    assert f"{abs(change):.1f} %" in page.text("#comparison")
    assert "vs=" in page.value("location.href")
    compared = page.text("#comparison")
    page.reload()
    page.wait(f"document.querySelector('#comparison table') && {PREDICTED}")
    assert page.text("#comparison") == compared
    page.click("#comparison button")
    page.wait(f"answer.step_time === {first}")


def test_bad_input_is_one_sentence_and_keeps_the_last_answer(show):
    page = show(JOB)
    before = page.text("#cards")
    page.choose("model", "lama-3-8b")
    page.wait("!document.getElementById('error').hidden")
    assert "no shipped model has this name" in page.text("#error")
    assert page.value("document.getElementById('model').getAttribute('aria-invalid')") == "true"
    assert page.text("#cards") == before
    page.click("#error button")
    page.wait(f"document.getElementById('error').hidden && {PREDICTED}")
    page.problems[:] = [problem for problem in page.problems if "400 (Bad Request)" not in problem]


def test_a_link_with_markup_shows_it_as_text(show, page, server):
    text = '<img src=x onerror="document.title=1">'
    page.open(f"{server.url}?{urlencode({**SMALL, 'model': text, 'order': text})}")
    page.wait("!document.getElementById('error').hidden")
    assert "<img" in page.text("#error")
    assert page.value("document.images.length") == 0
    page.problems.clear()


def test_a_plan_that_does_not_fit_shows_what_would(show):
    page = show({**JOB, "zero": 0, "tp": 1})
    assert "Does not fit" in page.text("#verdict")
    page.wait("document.querySelector('#remedies table')")
    page.click("#remedies button")
    page.wait(f"answer.fits && {PREDICTED}")


def test_a_pasted_model_is_part_of_the_link(show):
    page = show(JOB)
    page.value(f"document.getElementById('config').value = {CONFIG!r}")
    page.click("#read")
    page.wait(f"answer.plan.job.model.hidden_size === 1024 && {PREDICTED}")
    assert quote('"hidden_size"', safe="") in page.value("location.hash")
    page.reload()
    page.wait(f"answer && answer.plan.job.model.hidden_size === 1024 && {PREDICTED}")
    page.click("#clear")
    page.wait("location.hash === ''")
    page.wait(f"answer.plan.job.model.name === 'llama-3-8b' && {PREDICTED}")


def test_a_pasted_config_takes_what_it_lacks_from_the_fields(show):
    page = show(JOB)
    page.value(f"document.getElementById('config').value = {TRAINER!r}")
    page.click("#read")
    page.wait(f"answer.config && answer.plan.micro_batch === 2 && {PREDICTED}")
    assert page.value("[state.chips, state.model, state.tp]") == ["8", None, None]
    assert "Read as" in page.value("document.getElementById('config-notes').textContent")
    page.wait("running === null && result && result.model === 'llama-3.1-8b'")
    page.problems[:] = [problem for problem in page.problems if "400 (Bad Request)" not in problem]


def test_a_search_is_replaced_by_a_newer_one_and_can_be_cancelled(show):
    page = show(
        {
            "model": "llama-3.1-405b",
            "cluster": "dgx-h100",
            "chips": 4096,
            "global_batch": 4096,
            "seq_len": 8192,
            "tp": 8,
            "pp": 8,
            "zero": 1,
        }
    )
    page.wait("running !== null")
    page.click("#cancel")
    page.wait("document.getElementById('search-state').textContent === 'Search cancelled.'")
    page.choose("chips-exact", "8192")
    page.wait("running !== null")
    page.choose("model", "gpt2")
    page.choose("seq_len-exact", "1024")
    page.choose("chips-exact", "8")
    page.choose("global_batch-exact", "64")
    page.wait("running === null && result && result.model === 'gpt2'")
    page.problems[:] = [problem for problem in page.problems if "400 (Bad Request)" not in problem]


def test_every_control_has_a_name_and_the_keyboard_reaches_it(show):
    page = show(JOB)
    unnamed = page.value(
        "[...document.querySelectorAll('input:not([type=file]), select, textarea, button')]"
        ".filter(e => !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim()).map(e => e.id)"
    )
    assert unnamed == []
    page.value("document.getElementById('chips').focus()")
    page.key("ArrowRight", 39)
    page.wait(f"answer.plan.num_chips === 16 && {PREDICTED}")
    page.key("Tab", 9)
    assert page.value("document.activeElement.id") == "chips-exact"
    assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_nothing_is_wider_than_the_window(show):
    page = show(JOB)
    page.wait("document.querySelector('#plans table')")
    for width in (360, 400, 1300):
        page.resize(width, 800)
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            assert page.value("document.documentElement.scrollWidth") <= width, (width, scheme)
            dark = page.value("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
            assert dark == (scheme == "dark"), (width, scheme)
