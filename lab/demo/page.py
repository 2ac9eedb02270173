"""Render the demo's findings as one self-contained HTML page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2


def render(findings: Mapping[str, Any], template: str = "page.html") -> str:
    """Render the page, escaping everything but the pictures.

    Raises:
        jinja2.UndefinedError: the template uses a name that `findings` lacks.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template(template).render(findings)
