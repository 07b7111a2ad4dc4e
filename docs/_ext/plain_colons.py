"""Keep napoleon from taking what stands before a colon for a type.

Types stand in signatures here, so ``Returns:`` and the docstring of a property are sentences, and a
colon in one of them is a colon.  It is hidden while napoleon looks.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

_HIDDEN = "\ue000"  # from the private use area: no text holds it
_SENTENCES = ("Returns:", "Yields:")


def hide(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Before napoleon: hide the colons of sentences."""
    is_sentence = what in ("attribute", "data", "property")
    for index, line in enumerate(lines):
        if line and not line[0].isspace() and index:
            is_sentence = line in _SENTENCES
        if is_sentence:
            lines[index] = line.replace(": ", f"{_HIDDEN} ")


def show(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """After napoleon: show them again."""
    lines[:] = [line.replace(_HIDDEN, ":") for line in lines]


def setup(app: Sphinx) -> dict[str, Any]:
    """Stand before and after napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", hide, priority=400)
    app.connect("autodoc-process-docstring", show, priority=600)
    return {"version": "1", "parallel_read_safe": True}
