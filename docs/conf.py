"""The documentation site: `make docs` builds it offline into build/docs; every warning is an error."""

import sys
from pathlib import Path

# The extension `site_pages` lies next to this file; it reads `perfmodel` of this checkout.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

project = "perfmodel"
copyright = "the perfmodel authors, Apache License 2.0"
extensions = ["myst_nb", "site_pages"]
exclude_patterns = ["figures", "schemas"]
smartquotes = False

myst_heading_anchors = 3
nb_execution_mode = "off"

html_theme = "furo"
html_title = "perfmodel"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
