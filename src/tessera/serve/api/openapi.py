"""Describe the API: its OpenAPI description, and the page at /docs, which loads no assets from elsewhere."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI

from tessera.serve.api.schema import Schema

REFERENCE = "#/components/schemas/"
"""Start of the references to schemas in an OpenAPI description."""
STYLE = """
:root { color-scheme: light dark; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
h2 { margin: 2.2rem 0 0.3rem; font-size: 1.05rem; } p { margin: 0.3rem 0 0.6rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 0.25rem 0.8rem 0.25rem 0; overflow-wrap: anywhere;
  border-bottom: 1px solid light-dark(#d9d5cd, #363b42); }
th:first-child { width: 14rem; } th:last-child { width: 9rem; }
"""
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "Cache-Control": "no-cache"}
"""Headers of the page at /docs: the browser runs no script on it."""
LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} fields",
    "pattern": "matches {}",
}
"""Keyword of a JSON schema -> its meaning in the table of fields."""


def described(schema: type[Schema]) -> dict[str, Any]:
    """Return the part of a route's OpenAPI description that describes the request's body."""
    content = {"application/json": {"schema": {"$ref": REFERENCE + schema.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def describe(app: FastAPI, bodies: Sequence[type[Schema]]) -> None:
    """Add the schemas of `bodies`, to which the application's routes refer, to its OpenAPI description."""
    schemas = app.openapi().setdefault("components", {}).setdefault("schemas", {})
    for body in bodies:
        own = body.model_json_schema(ref_template=REFERENCE + "{model}")
        schemas |= own.pop("$defs", {}) | {body.__name__: own}


def page(api: Mapping[str, Any]) -> str:
    """Return the HTML page that lists the routes, and the fields of each schema, of an OpenAPI description."""
    title = f"{escape(api['info']['title'])} {escape(api['info']['version'])}"
    lines = ["<!doctype html>", '<html lang="en"><meta charset="utf-8">', f"<title>{title}</title>"]
    lines += [f"<style>{STYLE}</style>", f"<h1>{title}</h1>", '<p>The same as JSON: <a href="/openapi.json">']
    lines.append("/openapi.json</a></p><h2>Routes</h2><table><tr><th>Route<th>Body")
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            lines.append(f"<tr><td>{method.upper()} {escape(path)}<td>{_kind(body) if body else ''}")
    lines.append("</table>")
    for name, schema in sorted(api["components"]["schemas"].items()):
        lines.append(f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(schema.get("description", ""))}</p>')
        lines.append("<table><tr><th>Field<th>Value<th>If left out")
        required = schema.get("required", ())
        for field, form in schema.get("properties", {}).items():
            default = "required" if field in required else f"{form.get('default')}".replace("None", "")
            lines.append(f"<tr><td>{escape(field)}<td>{_kind(form)}<td>{escape(default)}")
        lines.append("</table>")
    return "\n".join(lines) + "\n"


def _kind(form: Mapping[str, Any]) -> str:
    """Return HTML that says which values a JSON schema accepts. It leaves out null, which every field accepts."""
    if "$ref" in form:
        name = escape(form["$ref"].removeprefix(REFERENCE))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in form:
        return " or ".join(_kind(each) for each in form["anyOf"] if each.get("type") != "null")
    if values := form.get("enum") or ([form["const"]] if "const" in form else None):
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in values)
    if "prefixItems" in form:
        return f"list of ({', '.join(map(_kind, form['prefixItems']))})"
    said = [f"list of ({_kind(form['items'])})"] if form.get("type") == "array" else [escape(form.get("type", "any"))]
    return ", ".join(said + [escape(text.format(form[name])) for name, text in LIMITS.items() if name in form])
