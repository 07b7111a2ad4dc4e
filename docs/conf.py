"""Sphinx settings: MyST pages, the furo theme, and tables that are made from the code."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import flashrl  # noqa: E402

project = "FlashRL"
author = "FlashRL developers"
project_copyright = author
release = version = flashrl.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "made_from_code",
    "plain_colons",
]
exclude_patterns = ["_build", "_templates", "_ext"]
templates_path = ["_templates"]
suppress_warnings = ["config.cache"]

# Pages. Everything is on disk: no font, script or inventory is fetched.
html_theme = "furo"
html_title = f"FlashRL {release}"
html_static_path = ["_static"]
html_css_files = ["flashrl.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Reference.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
autosummary_generate = True
autosummary_ignore_module_all = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Examples. A page's examples run in a folder of their own, offline. Those in docstrings need their
# module's names: pytest runs them.
doctest_test_doctest_blocks = ""
doctest_global_setup = """
import os as _os, tempfile as _tempfile
_os.environ["HF_HUB_OFFLINE"] = "1"
_before, _scratch = _os.getcwd(), _tempfile.TemporaryDirectory()
_os.chdir(_scratch.name)
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
"""
doctest_global_cleanup = """
_os.chdir(_before)
_scratch.cleanup()
"""
