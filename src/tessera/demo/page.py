"""Render the demo's findings as one self-contained HTML page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2


def render(findings: Mapping[str, Any], template: str = "page.html") -> str:
    """Render the page, escaping everything but the pictures; raise jinja2.UndefinedError if a name is missing."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template(template).render(findings)
