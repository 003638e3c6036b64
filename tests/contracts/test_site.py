"""The documentation site names every public name with an example, and its links lead to pages."""

import importlib.util
import re

import pytest

import perfmodel
from tests.documents import PAGES, ROOT, blocks
from tests.signatures import public_functions

_SPEC = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
assert _SPEC is not None
assert _SPEC.loader is not None
site_pages = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(site_pages)

API = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", perfmodel.__all__)
def test_every_public_name_has_an_example(name):
    examples = "".join(block.text for block in blocks(API) if block.info.startswith("python"))
    assert re.search(rf"\bperfmodel\.{name}\b", examples), f"{name}: add an example to docs/reference/api.md"


def test_every_function_and_type_has_its_generated_table():
    functions = {name for name, function in public_functions().items() if function.__name__ == name}
    types = {name for name in perfmodel.__all__ if isinstance(getattr(perfmodel, name), type)}
    assert set(re.findall(r"^<!--site:signature (\w+)-->$", API, re.MULTILINE)) == functions
    assert set(re.findall(r"^<!--site:type (\w+)-->$", API, re.MULTILINE)) == types


def test_an_argument_has_its_type_default_and_meaning():
    row = "| `tp` | `int \\| None` | `None` | Tensor-parallel degree. |"
    assert row in site_pages.signature_text("predict")


def test_every_command_and_option_is_on_its_page():
    text = site_pages.commands_text()
    assert "### predict" in text
    assert "| `--seq-len, --seq N` |" in text


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    path = ROOT / page
    site_pages.site_links(path.read_text(encoding="utf-8"), folder=path.parent, page=path)


def test_a_link_to_nothing_is_found():
    with pytest.raises(site_pages.BrokenLinkError, match=r"nothing\.md"):
        site_pages.site_links("[x](nothing.md)", folder=ROOT / "docs", page=ROOT / "docs" / "index.md")


def test_links_that_leave_the_folder_of_pages_have_pages_of_the_site():
    page = ROOT / "docs" / "how-to" / "predict.md"
    text = "[map](../../ARCHITECTURE.md#levels) [data](../../strategies/published_layouts.yaml) [terms](../glossary.md)"
    linked = site_pages.site_links(text, folder=page.parent, page=page)
    assert linked == "[map](../project/architecture.md#levels) data [terms](../glossary.md)"


def test_how_to_guides_are_two_clicks_from_the_readme():
    assert "(docs/how-to/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "how-to" / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs" / "how-to").glob("*.md")} - {"index.md"}
    assert len(pages) >= 10
    assert pages <= set(re.findall(r"\]\(([\w-]+\.md)\)", index))
