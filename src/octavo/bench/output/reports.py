"""Everything in a run's folder that is made from run.json and requests.jsonl."""

from __future__ import annotations

from pathlib import Path

from octavo.bench.output.folder import Results, read_folder, write_run
from octavo.bench.output.html import page
from octavo.bench.output.markdown import markdown
from octavo.bench.output.plots import NO_PICTURES, can_draw, pictures_of


def write_reports(folder: Path, results: Results) -> list[str]:
    """report.md, report.html and the pictures. What it returns is to be told to the user."""
    pictures = pictures_of(results) if can_draw() else []
    for picture in pictures:
        (folder / f"{picture.name}.png").write_bytes(picture.png)
    (folder / "report.md").write_text(markdown(results.run, pictures), encoding="utf-8")
    (folder / "report.html").write_text(page(results.run, pictures), encoding="utf-8")
    return [] if can_draw() else [NO_PICTURES]


def write_folder(folder: Path, results: Results) -> list[str]:
    """At the end of a run, whose requests are already in the folder: all other files."""
    write_run(folder, results.run)
    return write_reports(folder, results)


def remake_reports(folder: Path) -> list[str]:
    """Of a folder that exists, with this version's definitions of pictures and pages."""
    return write_folder(folder, read_folder(folder))
