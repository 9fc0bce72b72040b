"""The comparison as one HTML file that needs nothing else: charts, tables, differences."""

import base64
import contextlib
import hashlib
import os
import re
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

import halfword
from halfword.errors import UsageError
from halfword.report.charts import charts
from halfword.report.comparison import Comparison
from halfword.report.details import configuration, step_times
from halfword.report.page import remarks_on_equality
from halfword.report.tables import tables

SUFFIXES = {".html", ".htm"}


def write_html(comparison: Comparison, output: Path) -> None:
    """Write the page aside and rename it: readers see all of it or none."""
    text = to_html(comparison)
    aside = output.with_name(f".{output.name}.tmp")
    try:
        if not output.parent.exists():
            output.parent.mkdir(parents=True)
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, output)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        fix = f"cannot be written ({error.strerror}); name a file that can"
        raise UsageError("--output", output, fix) from None


def check_output(output: Path) -> None:
    """Refuse a page's place by its name, before anything is read.

    Raises:
        UsageError: a folder, or a name that may be that of a run's own file.
    """
    if output.is_dir():
        raise UsageError("--output", output, "is a folder; name a file, as report.html")
    if output.suffix.lower() not in SUFFIXES:
        raise UsageError("--output", output, "is no page's name; name a file that ends in .html")


def to_html(comparison: Comparison) -> str:
    """The page, as text.

    Whatever runs are called, they stay text: the template escapes, and the page's own policy lets
    a browser run these scripts alone, by their hashes, and load nothing.
    """
    environment = Environment(
        loader=PackageLoader("halfword.report", "web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    scripts = [_resource("echarts/echarts.common.min.js"), _resource("report.js")]
    return environment.get_template("report.html").render(
        names=[run.label for run in comparison.runs],
        sentence=comparison.sentence(),
        equality=remarks_on_equality(comparison),
        warnings=comparison.warnings,
        tables=tables(comparison),
        step_times=step_times(comparison),
        configuration=configuration(comparison),
        charts=charts(comparison),
        style=Markup(_resource("report.css")),
        scripts=[Markup(script) for script in scripts],
        hashes=[_hash(script) for script in scripts],
        version=halfword.__version__,
    )


def _resource(name: str) -> str:
    return resources.files("halfword.report").joinpath("web", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _code(text: str) -> Markup:
    """Show what stands between backticks as code, and escape everything."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))
