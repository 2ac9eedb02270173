"""One self-contained HTML page from the demo's findings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2


def render(findings: Mapping[str, Any]) -> str:
    """The page. Everything but the pictures is escaped; a name that is missing raises."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(findings)
