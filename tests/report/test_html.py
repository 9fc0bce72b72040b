import hashlib
import io
import json
import math
import re
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest
from rich.console import Console

import halfword.report.html
from halfword.errors import UsageError
from halfword.report import report
from halfword.report.html import to_html

LOSSES = [4.0, 3.0, 2.5, 2.25]
HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)> \"'`${7*7}{{7*7}}"
WEB = resources.files("halfword.report").joinpath("web")
LOADING = {"src", "href", "srcset", "action", "data", "poster", "background", "formaction", "ping"}


class Page(HTMLParser):
    """A page as a browser would read it: tags, text, and scripts apart."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.words = [], [], []
        self.feed(text)
        self.text = re.sub(r"\s+", " ", "".join(self.words))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script" and self.cdata_elem:
            self.scripts[-1] += data
        elif not self.cdata_elem:
            self.words.append(data)

    @property
    def data(self):
        return json.loads(self.scripts[0], parse_constant=lambda name: pytest.fail(name))


def terminal():
    return Console(file=io.StringIO(), width=100)


def test_the_page_holds_verdicts_warnings_tables_and_differences(write_run, compared):
    lean = {"settings": {"precision": "lean", "seed": 1, "run": "b"}}
    paths = [
        write_run("fp32-master", LOSSES, sizes=(2, 4, 8, 2)),
        write_run("exact", LOSSES),
        write_run("lean", [*LOSSES[:3], math.nan], summary=lean),
    ]
    comparison = compared(*paths)
    page = Page(to_html(comparison))
    assert comparison.sentence().replace("`", "") in page.text
    assert "exact equals fp32-master to the last bit over 4 steps (losses, weights" in page.text
    assert "lean differs from fp32-master from step 3." in page.text
    assert "lean: loss is nan at step 3, not finite at 1 of 4 steps" in page.text
    assert "Every step is drawn." in page.text
    headings = re.findall(r"<h2[^>]*>([^<]*)", to_html(comparison))
    sections = ["Equality", "Warnings", "Loss by step", "Memory", "Step time", "Configuration"]
    assert headings == sections
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', to_html(comparison))
    cells = {name: re.findall("<td>(.*?)</td>", row) for name, row in rows[-2:]}
    assert cells == {"precision": ["exact", "exact", "lean"], "seed": ["0", "0", "1"]}
    assert page.data["memory"]["totals"] == [16.004, 14.004, 14.004]


def test_one_run_alone_has_a_page_without_verdicts(write_run, compared):
    text = to_html(compared(write_run("exact", LOSSES)))
    page = Page(text)
    assert "exact has a loss of 2.25 after 4 steps and keeps 14.0 bytes a parameter." in page.text
    assert "Equality" not in page.text and "Warnings" not in page.text
    assert '<th scope="row">learning_rate</th><td>0.001</td>' in text
    assert "As the run recorded it." in page.text


def test_files_of_losses_alone_have_a_page(write_csv, compared):
    paths = [write_csv("a.csv", LOSSES), write_csv("b.csv", LOSSES)]
    page = Page(to_html(compared(*paths)))
    assert page.data["time"] is None and "No difference was recorded." in page.text
    assert "Not recorded." in Page(to_html(compared(paths[0]))).text


def test_a_hostile_name_stays_text(write_run, compared):
    name = HOSTILE.replace("/", "\N{DIVISION SLASH}")  # the one character it could not have
    hostile = {"settings": {"precision": HOSTILE}, "corpus": {"name": HOSTILE}}
    paths = [write_run("a", LOSSES), write_run(name, LOSSES, summary=hostile)]
    comparison = compared(*paths)
    page, plain = Page(to_html(comparison)), Page(to_html(compared(paths[0], paths[0])))
    assert name in page.text
    assert page.data["memory"]["labels"] == ["a", name]
    assert page.scripts[1:] == plain.scripts[1:] and len(page.scripts) == 3
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in plain.tags} | {"ul", "li"}
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)


def test_a_name_that_is_no_text_is_shown_by_its_bytes(write_run, tmp_path):
    path = write_run("a\udcff", LOSSES)
    report([path], tmp_path / "report.html", terminal())
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.data["memory"]["labels"] == ["a\\xff"]


def test_the_page_loads_nothing(write_run, compared):
    text = to_html(compared(write_run("a", LOSSES)))
    for tag, attributes in Page(text).tags:
        assert not attributes.keys() & LOADING, (tag, attributes)
        assert tag not in {"link", "iframe", "img", "base", "object"}
    style = re.search("<style>(.*?)</style>", text, re.DOTALL)[1]
    assert "url(" not in style and "@import" not in style
    own_script = Page(text).scripts[2]
    for word in ("fetch(", "XMLHttpRequest", "import(", "WebSocket", "http:", "https:"):
        assert word not in own_script


def test_the_policy_allows_these_scripts_alone(write_run, compared):
    page = Page(to_html(compared(write_run("a", LOSSES))))
    (policy,) = (a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    _, *scripts = page.scripts
    hashes = {halfword.report.html._hash(script) for script in scripts}
    assert set(re.findall("sha256-[^']*", policy)) == hashes and len(hashes) == 2
    assert "unsafe-eval" not in policy and "http" not in policy


def test_the_charting_library_is_what_its_checksums_say():
    folder = WEB.joinpath("echarts")
    lines = folder.joinpath("SHA256SUMS").read_text().splitlines()
    sums = dict(reversed(line.split("  ")) for line in lines)
    assert sums.keys() == {"LICENSE", "LICENSE-d3", "NOTICE", "echarts.common.min.js"}
    for name, digest in sums.items():
        assert hashlib.sha256(folder.joinpath(name).read_bytes()).hexdigest() == digest
    assert len(folder.joinpath("echarts.common.min.js").read_bytes()) <= 1_500_000


def test_four_runs_of_ten_thousand_steps_fit_five_megabytes(write_run, compared):
    generator = np.random.default_rng(0)
    runs = [generator.normal(2, 0.1, 10_000).tolist() for _ in range(4)]
    comparison = compared(*(write_run(f"run{n}", losses) for n, losses in enumerate(runs)))
    text = to_html(comparison)
    assert len(text.encode()) <= 5_000_000
    page = Page(text)
    drawn = len(page.data["loss"]["steps"])
    assert 2000 <= drawn <= 8000
    assert f"Drawn are {drawn} of 10000 steps: of each short stretch" in page.text


def test_a_page_is_written_whole_in_place_of_an_earlier_one(write_run, tmp_path):
    console, output = terminal(), tmp_path / "new" / "report.html"
    comparison = report([write_run("a", LOSSES)], output, console)
    assert comparison.sentence() in console.file.getvalue()
    report([write_run("b", LOSSES)], output, console)
    assert "halfword: b</title>" in output.read_text()
    assert [path.name for path in output.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("folder.html", "is a folder; name a file, as report.html"),
        ("metrics.csv", "is no page's name; name a file that ends in .html"),
        ("file/report.html", "cannot be written (Not a directory); name a file that can"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(write_run, tmp_path, name, fix):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError) as error:
        report([write_run("a", LOSSES)], tmp_path / name, terminal())
    assert str(error.value) == f"--output {tmp_path / name}: {fix}"


def test_a_full_disk_leaves_the_earlier_page_whole(write_run, tmp_path, monkeypatch):
    path, output = write_run("a", LOSSES), tmp_path / "out" / "report.html"
    report([path], output, terminal())
    before = output.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UsageError, match=r"cannot be written \(No space left on device\)"):
        report([path, path], output, terminal())
    assert output.read_bytes() == before
    assert [path.name for path in output.parent.iterdir()] == ["report.html"]
