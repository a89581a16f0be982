"""report.html: one file that needs nothing else, and runs nothing.

Names of models and servers are other people's text. Jinja escapes each value, and the page's own
policy forbids scripts and every address outside the file.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256

from octavo.bench.output.contents import Table, definitions_of, facts_of, tables_of
from octavo.bench.output.plots import Picture
from octavo.bench.output.run import Run
from octavo.bench.output.text import checks_in_words, count_checks, title

_STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1f2933; --muted: #667085; --line: #e4e7ec; --paper: #fff; --band: #f7f8fa;
  --good: #00754f; --bad: #b42318;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e9ee; --muted: #98a2b3; --line: #344054; --paper: #14181f; --band: #1b212b;
    --good: #32d583; --bad: #f97066;
  }
}
body {
  margin: 2rem auto; max-width: 76rem; padding: 0 1.25rem;
  background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p, li { max-width: 60rem; overflow-wrap: break-word; }
ul { padding-left: 1.2rem; }
.muted, th { color: var(--muted); }
.verdict { font-weight: 600; color: var(--good); }
.verdict.bad { color: var(--bad); }
figure { margin: 1.5rem 0; }
img {
  display: block; width: 100%; max-width: 64rem; height: auto;
  background: #fff; border: 1px solid var(--line); border-radius: 8px;
}
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td {
  padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top; white-space: nowrap;
}
th { font-weight: 500; }
td:last-child { white-space: normal; overflow-wrap: break-word; }
tr:hover td { background: var(--band); }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'sha256-{{ style_hash }}'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="verdict{{ '' if is_good else ' bad' }}">{{ verdict }}</p>
{% if reasons %}<ul>{% for reason in reasons %}<li>{{ reason }}</li>{% endfor %}</ul>{% endif %}
{% if findings %}
<h2>Findings</h2>
<ul>{% for sentence, method in findings %}
<li>{{ sentence }} <span class="muted">{{ method }}</span></li>
{% endfor %}</ul>
{% endif %}
{% for caption, data in pictures %}
<figure><img src="data:image/png;base64,{{ data }}" alt="{{ caption }}"></figure>
{% endfor %}
{% for table in tables %}
<h2>{{ table.title }}</h2>
<div class="scroll"><table>
<tr>{% for column in table.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% if table.note %}<p class="muted">{{ table.note }}</p>{% endif %}
{% endfor %}
{% if definitions %}
<h2>Definitions</h2>
<p class="muted">a: when a request was due; s: when it was sent; c<sub>1</sub> … c<sub>m</sub>: when
its chunks with output came; k<sub>j</sub>: tokens of chunk j; d: when its stream had ended; n: its
output tokens.</p>
<div class="scroll"><table>
{% for label, formula, meaning in definitions %}
<tr><td>{{ label }}</td><td><code>{{ formula }}</code></td><td>{{ meaning }}</td></tr>
{% endfor %}
</table></div>
{% endif %}
<h2>Where and how</h2>
<div class="scroll"><table>
{% for name, value in facts %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}
</table></div>
</body>
</html>
"""


def page(run: Run, pictures: Sequence[Picture]) -> str:
    return document(
        title=title(run),
        verdict=count_checks(run),
        is_good=run.is_valid,
        reasons=[*checks_in_words(run), *run.notes],
        findings=[(finding.sentence, finding.method) for finding in run.findings],
        pictures=pictures,
        tables=tables_of(run),
        definitions=definitions_of(run),
        facts=facts_of(run),
    )


def document(
    *,
    title: str,
    verdict: str,
    is_good: bool,
    reasons: Sequence[str],
    findings: Sequence[tuple[str, str]],
    pictures: Sequence[Picture],
    tables: Sequence[Table],
    facts: Sequence[tuple[str, str]],
    definitions: Sequence[tuple[str, str, str]] = (),
) -> str:
    """A page of this look. verdict: green if is_good, else red; reasons: below it. findings:
    sentence and method. definitions, facts: see `definitions_of` and `facts_of`.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_PAGE).render(
        title=title,
        verdict=verdict,
        is_good=is_good,
        reasons=reasons,
        findings=findings,
        pictures=[(one.caption, b64encode(one.png).decode("ascii")) for one in pictures],
        tables=tables,
        definitions=definitions,
        facts=facts,
        style=_STYLE,
        style_hash=b64encode(sha256(_STYLE.encode()).digest()).decode("ascii"),
    )
