"""report.html and report.md: complete, closed to the outside, and safe with names of others."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser

from octavo.bench.curves import Finding
from octavo.bench.output.html import page
from octavo.bench.output.markdown import markdown
from octavo.bench.output.plots import Picture
from octavo.bench.output.run import Run
from octavo.bench.points import CheckStatus, Estimate
from support.bench_points import check, closed_point, open_point, quantiles, run_of

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>|`[a](http://evil) $x$\x1b[0m'
PICTURE = Picture("throughput-closed", "Throughput against load", b"\x89PNG")


def a_run(name: str = "SmolLM2") -> Run:
    run = run_of(
        closed_point(4, checks=(check("little", CheckStatus.FAIL, f"no steady state {name}"),)),
        open_point(9, failures={"timeout": 3}, server={"kv_usage_mean": 0.42}),
        slo="ttft_p99<500ms",
        findings=(
            Finding(
                name="x_max",
                unit="output tokens/s",
                estimate=Estimate(500.0),
                method="a ladder",
                sentence="X_max is 500 output tokens/s.",
            ),
        ),
    )
    served = replace(run.served, model=name, engine=name, settings={name: name})
    return replace(run, served=served)


class Elements(HTMLParser):
    """All elements with their attributes, and the text outside of <style>."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._is_style = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._is_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._is_style = False

    def handle_data(self, data: str) -> None:
        if not self._is_style:
            self.text += data


def test_the_page_needs_and_reaches_nothing_else() -> None:
    html = page(a_run(), [PICTURE])
    elements = Elements(html).elements
    addresses = [
        value
        for _, attributes in elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "data", "action")
    ]
    assert addresses == [f"data:image/png;base64,{b64encode(PICTURE.png).decode()}"]
    assert not {tag for tag, _ in elements} & {"script", "link", "iframe", "object", "svg"}
    assert "url(" not in html
    assert "@import" not in html


def test_the_pages_policy_allows_its_own_style_and_no_script() -> None:
    html = page(a_run(), [])
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    allowed = b64encode(sha256(style.encode()).digest()).decode()
    (policy,) = [
        attributes["content"]
        for tag, attributes in Elements(html).elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == f"default-src 'none'; img-src data:; style-src 'sha256-{allowed}'"
    # The policy covers no attributes.
    names = {name for _, attributes in Elements(html).elements for name in attributes}
    assert not {name for name in names if name.startswith("on") or name == "style"}


def test_names_of_others_are_text_in_the_page() -> None:
    html = page(a_run(EVIL), [Picture("x", EVIL, b"")])
    plain = page(a_run("SmolLM2"), [Picture("x", "caption", b"")])
    tags = [tag for tag, _ in Elements(html).elements]
    assert tags == [tag for tag, _ in Elements(plain).elements]
    assert "<script>alert(1)" in Elements(html).text


def test_names_of_others_are_text_in_markdown() -> None:
    text = markdown(a_run(EVIL), [])
    assert "\x1b" not in text
    assert not re.search(r"(?<!\\)[<>`]", text)
    assert "](http" not in re.sub(r"\\.", "", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
    assert len(cells) <= 4  # each table has one number of columns: none is broken by a name


def test_a_report_has_figures_findings_checks_and_where_they_come_from() -> None:
    run = a_run()
    for text in (Elements(page(run, [PICTURE])).text, markdown(run, [PICTURE]).replace("\\", "")):
        for expected in (
            "SmolLM2 on SmolLM2 0.1.0, mixed",
            "mixed: as it comes, 1/8 as long",
            "2 pass, 1 fail: this run is NOT VALID",
            "FAIL little (4 users: 1.2 %, limit 5 %): no steady state SmolLM2",
            "X_max is 500 output tokens/s.",
            "3 timeout",
            "88.9 [80, 90.7] %",
            "kv_usage_mean",
            "ttft_p99<500ms",
            "octavo bench sweep http://127.0.0.1:8000 --concurrency 1,2,4",
            "temperature=0",
            "sha256 5e5e5e5e5e5e5e5e",
        ):
            assert expected in text
    assert "![Throughput against load](throughput-closed.png)" in markdown(run, [PICTURE])
    assert "c_1 - a" in Elements(page(run, [])).text


def test_metrics_without_values_are_not_available() -> None:
    """BEN-01, BEN-14: counts are shown, and neither inf nor nan."""
    run = run_of(
        closed_point(1, metrics={"ttft": quantiles(50.0, count=1)}),
        closed_point(2),
    )
    text = markdown(run, [])
    rows = [line for line in text.splitlines() if line.startswith("| 1 user |")]
    assert any("| 0 | n/a | n/a | n/a | n/a | n/a |" in row for row in rows)
    assert any(r"| 1 | 1 | 55 \[52.8, 57.8\] |" in row for row in rows)
    assert not re.search(r"\b(inf|nan)\b", text)
