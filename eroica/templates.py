"""The texts under `prompts/`: Jinja2 templates for reports and for models, loaded from the wheel or from a checkout.

An installed package carries them as `eroica/prompts`; in a checkout they lie beside the package, where people find and
edit them. Values put into HTML are escaped unless they are `markupsafe.Markup`; an undefined name is an error, since
silence there would be a hole in a report. Used by the reports, by assist and by the MCP server's prompts.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import jinja2


def load(name: str) -> str:
    """Text of the template `name`, as it stands in the file. Raises jinja2.TemplateNotFound."""
    for folder in (resources.files("eroica") / "prompts", Path(__file__).parent.parent / "prompts"):
        file = folder / name
        if file.is_file():
            return file.read_text(encoding="utf-8")
    raise jinja2.TemplateNotFound(
        name, f"no template {name!r}: the installation lacks eroica/prompts; install it again"
    )


def render(name: str, **values: object) -> str:
    """The template `name` filled in with `values`."""
    return _environment.get_template(name).render(**values)


def _is_markup(name: str | None) -> bool:
    return name is not None and ".html" in name


_environment = jinja2.Environment(
    loader=jinja2.FunctionLoader(load),
    autoescape=_is_markup,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
