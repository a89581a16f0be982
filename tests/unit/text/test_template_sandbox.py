from __future__ import annotations

from typing import Any

import jinja2
import pytest

from octavo.text.template_meter import metered
from octavo.text.template_sandbox import TemplateEnvironment
from support.processor_time import takes_less_than

BIG = "b" * 1_000_000
# Two values of 2**40 elements that take no memory, in n.x and n.y.
NESTED = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(40) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)


def render(source: str, **variables: Any) -> str:
    template = TemplateEnvironment().from_string(source)
    with metered():
        return template.render(variables)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in big %}{% for j in big %}{% endfor %}{% endfor %}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10**9) | list }}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [1] * 10**10 }}",
        "{{ 10**100000 }}",
        "{% set n = namespace(x=7) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set n = namespace(x=big) %}"
        "{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=big) %}"
        "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='\\\\') %}"
        "{% for i in range(60) %}{% set n.x = n.x | tojson %}{% endfor %}",
        "{% set n = namespace(l=[]) %}"
        "{% for i in range(99999) %}{% set n.l = n.l + [big ~ i] %}{% endfor %}",
        "{% for c in big %}{% set x = big[1:] %}{% endfor %}",
        "{% set x %}{% for i in range(100000) %}{{ big }}{% endfor %}{% endset %}",
        "{% set x %}{% for i in range(100000) %}" + "a" * 5000 + "{% endfor %}{% endset %}",
        "{{ [big] * 1000 }}",
        "{{ ([big] * 1000) | join }}",
        "{{ ([big] * 1000) | string }}",
        "{{ ([big] * 1000) | tojson }}",
        "{{ [[[1] * 1000] * 1000] * 1000 }}",
        "{{ '' ~ ([big] * 1000) }}",
        "{{ ','.join([big] * 1000) }}",
        "{{ big | replace('b', big) }}",
        "{{ big.replace('b', big) }}",
        "{{ '%999999999d' % 3 }}",
        "{{ '%*d' % (10**9, 3) }}",
        "{{ '%999999999d' | format(3) }}",
        "{{ '{:999999999}'.format(3) }}",
        "{{ '{:{}}'.format(3, 10**9) }}",
        "{{ ('{0}' * 1000).format(big) }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a'.zfill(10**9) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a\nb' | indent(10**9) }}",
        "{{ [1] | tojson(indent=10**9) }}",
        "{{ [1, 2] | tojson(separators=(big, big)) }}",
        "{{ strftime_now('%999999Y') }}",
        "{{ lipsum(10**9) }}",
        NESTED + "{{ n.x == n.y }}",
        NESTED + "{{ n.x < n.y }}",
        NESTED + "{{ n.x in [n.y] }}",
        NESTED + "{{ n.x is eq(n.y) }}",
        NESTED + "{{ [n.x, n.y] | max }}",
        NESTED + "{{ [n.x, n.y] | sort }}",
        NESTED + "{{ [n.x].index(n.y) }}",
        NESTED.replace("[n.x, n.x]", "(n.x, n.x)") + "{{ {n.x: 1} }}",
        NESTED.replace("[n.x, n.x]", "{1: n.x, 2: n.x}") + "{{ n.x == n.y }}",
        NESTED.replace("[n.x, n.x]", "dict(a=n.x, b=n.x)") + "{{ n.x == n.y }}",
        NESTED.replace("[n.x, n.x]", "[[n.x] * 2, 1] | sort(attribute='z')"),
        NESTED.replace("[n.x, n.x]", "{1: n.x, 2: n.x}.values() | list"),
        "{% macro f(d) %}{% if d %}{{ f(d - 1, varargs, varargs) }}{% else %}"
        "{{ varargs == [1] }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% set n = namespace(t=()) %}"
        "{% for i in range(200000) %}{% set n.t = (n.t,) %}{% endfor %}{{ {n.t: 1} }}",
        "{{ {'a': [big] * 1000}.values() }}",
        "{{ range(99999) | select('in', range(99999) | list) | list }}",
        "{{ range(99999) | selectattr('real', 'in', range(99999) | list) | list }}",
        "{% for i in range(99999) if i in range(99999) | map('string') %}{% endfor %}",
        "{% set a = range(99999) | list %}{% set b = range(99999) | list %}"
        + "{% set x = a == b %}" * 5000,
        "{{ ('0' * 99999) | map(attribute='0' ~ '.0' * 99999) | list }}",
        "{{ big | sort }}",
        "{{ big | map('upper') | list }}",
        "{{ big.strip('a' * 10**6 ~ 'b') }}",
        "{{ big | trim('a' * 10**6 ~ 'b') }}",
        "{{ big.rfind('b' * 10**5 ~ 'a' ~ 'b' * 10**5) }}",
        "{{ big.rsplit(sep='b' * 10**5 ~ 'a' ~ 'b' * 10**5) }}",
        "{{ 1 | round(10**9, 'ceil') }}",
        "{{ 1 | round(-10**9) }}",
        "{{ (1).to_bytes(10**9, 'big') }}",
        "{{ big | int(0, 36) + ('f' * 10**6) | int(0, 16) }}",
    ],
)
def test_explosions_are_refused_quickly(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.text.template_meter.MAX_SECONDS", 1.0)
    refused = (jinja2.TemplateError, OverflowError, RecursionError)
    with takes_less_than(5), pytest.raises(refused):
        render(source, big=BIG)


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.text.template_meter.MAX_SECONDS", 0.0)
    with pytest.raises(jinja2.TemplateError, match="for more than 0 seconds"):
        render("{% for i in [1] %}{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ [].append(1) }}",
        "{{ {}.update(a=1) }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ 'a'.encode() }}",
    ],
)
def test_python_is_out_of_reach(source: str) -> None:
    with pytest.raises(jinja2.TemplateError, match="unsafe"):
        render(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for i in x %}\n  {% if i == 2 %}\n{% continue %}\n  {% endif %}\n"
            "{{ i }}\n{% endfor %}",
            "1\n3\n",
        ),
        ("{% for i in x %}{{ loop.index }}{{ '.' if loop.last else ',' }}{% endfor %}", "1,2,3."),
        ("{{ {'a': 'é<'} | tojson }}{{ [1] | tojson(indent=1) }}", '{"a": "é<"}[\n 1\n]'),
        ("{{ 'a' ~ 1 ~ none ~ missing }}", "a1None"),
        ("{{ x[1:] }}{{ x[::-1] }}{{ 'abc'[:2] }}", "[2, 3][3, 2, 1]ab"),
        ("{{ x | map('string') | join('+') }}{{ ', '.join(['a', 'b']) }}", "1+2+3a, b"),
        ("{{ '%s-%03d' % ('a', 7) }}{{ '%(k)s' % {'k': 1} }}{{ '%s' | format('q') }}", "a-0071q"),
        ("{{ '{a:>3}|{}'.format(1, a=2) }}", "  2|1"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ 'xax'.replace('x', 'y') }}{{ 'xax' | replace('x', 'z', 1) }}", "yayzax"),
        ("{{ 2 * 3 }}{{ 2 ** 5 }}{{ 7 % 4 }}{{ 'ab' * 2 }}", "6323abab"),
        ("{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(1) ~ f(2) }}", "<1><2>"),
        ("{% set n = namespace(v=0) %}{% for i in x %}{% set n.v = i %}{% endfor %}{{ n.v }}", "3"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ x == [1, 2, 3] }}{{ 2 in x }}{{ 4 in (1, 4) }}{{ 1 < 2 < 3 }}", "TrueTrueTrueTrue"),
        ("{{ x is sequence }}{{ 'a' is in ['a'] }}{{ y is defined }}", "TrueTrueFalse"),
        ("{{ x | select('odd') | list }}{{ x | reject('eq', 2) | list }}", "[1, 3][1, 3]"),
        ("{% for i in x if i > 1 %}{{ i }}{% endfor %}", "23"),
        ("{% set a, b = 1, 2 %}{{ b }}{{ a }}", "21"),
        ("{% for k, v in {1: 2}.items() %}{{ k }}{{ v }}{% endfor %}", "12"),
        ("{{ {'a': 1} | tojson }}{{ {'a': x}['a'][0] }}{{ {'a': 1}.get('a') }}", '{"a": 1}11'),
        ("{{ ' a '.strip() }}{{ 'xax' | trim('x') }}{{ 'a,b,c'.rsplit(',', 1)[0] }}", "aaa,b"),
        ("{{ 2.55 | round(1) }}{{ 'ab' | list }}{{ 'a-b' | title }}", "2.5['a', 'b']A-B"),
        ("{% macro f() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, a=2) }}", "(1,){'a': 2}"),
        ("{{ namespace(a=1) }}", "<Namespace>"),
    ],
)
def test_ordinary_templates_work(source: str, expected: str) -> None:
    assert render(source, x=[1, 2, 3]) == expected


def test_a_template_can_say_what_is_wrong() -> None:
    with pytest.raises(jinja2.TemplateError, match=r"^roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_long_conversation_fits_the_bounds() -> None:
    messages = [{"role": "user", "content": "word " * 200} for _ in range(2000)]
    source = (
        "{% for m in messages %}{% set c = m.role ~ '\n' ~ m.content | trim %}"
        "{{ '<' + c + '>' }}{% endfor %}"
    )
    assert len(render(source, messages=messages)) > 2_000_000


def test_a_long_conversation_may_be_copied_message_by_message() -> None:
    messages = [{"role": "user", "content": "word " * 200} for _ in range(500)]
    source = (
        "{% set n = namespace(seen=[]) %}"
        "{% for m in messages %}{% set n.seen = n.seen + [m] %}{% endfor %}"
        "{% for m in n.seen if m.role == 'user' and m in messages %}{{ m.content }}{% endfor %}"
    )
    assert len(render(source, messages=messages)) == 500_000


def test_renderings_are_counted_apart() -> None:
    template = TemplateEnvironment().from_string("{% for i in range(90000) %}{% endfor %}")
    for _ in range(15):
        with metered():
            template.render()
