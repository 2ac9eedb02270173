"""One self-contained HTML page from the demo's findings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2


def render(findings: Mapping[str, Any], template: str = "page.html") -> str:
    """The page. Everything but the pictures is escaped; a name that is missing raises."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template(template).render(findings)
