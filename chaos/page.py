"""The simulator's report as one HTML page that needs nothing else: the same words and numbers as in text, with the tables that text
has no room for. It can be attached to a ticket, or kept by a build.

Everything is escaped; the page's own policy forbids it to load or run anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from holdfast.chaos.campaign.campaign import Finding
from holdfast.chaos.campaign.proof import Verdict
from holdfast.chaos.campaign.summary import CoverageReport, Failure, FaultCount, Summary
from holdfast.chaos.report import caught, faults_heading, summary_rows, summary_title

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --ground: #f4f6f8; --card: #fff; --ink: #17212b; --quiet: #536170; --line: #d9e0e7;
  --good: #1b6b3a; --bad: #a3231f; --busy: #3f86b8; --code: #eef2f5; }
@media (prefers-color-scheme: dark) { :root { --ground: #10161c; --card: #18212a; --ink: #e4eaf0; --quiet: #a0aebb; --line: #2c3843;
  --good: #76d399; --bad: #ff9088; --busy: #4f9dd3; --code: #202b35; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1.2rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 0 0 .5rem; } h3 { font-size: 1rem; margin: .8rem 0 .2rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.1rem; margin: 1rem 0; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; } .quiet { color: var(--quiet); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
thead th { color: var(--quiet); font-weight: 500; } tbody th { font-weight: 500; }
.number { text-align: right; } meter { width: 8rem; }
pre { background: var(--code); padding: .7rem; border-radius: 6px; overflow: auto; font: .87em/1.45 ui-monospace, monospace; }
code { background: var(--code); padding: .1rem .3rem; border-radius: 4px; overflow-wrap: anywhere; }
:focus-visible { outline: 3px solid var(--busy); outline-offset: 2px; }
"""


def render_finding(
    found: Finding, coverage: CoverageReport | None, meanings: Mapping[str, str], *, command: str, made: str, version: str
) -> str:
    """The page of a campaign. `meanings`: of invariants; `command`: what was typed; `made`: when, in words."""
    summary = found.summary
    broke = summary.violations or summary.unjudged
    verdict = _verdict(summary)
    parts = [
        f'<p class="{"bad" if broke else "good"}">{"■" if broke else "●"} {escape(verdict)}</p>',
        _section("Summary", _pairs(summary_rows(summary, coverage))),
        *(_failure(failure, meanings) for failure in found.failures),
        _section("Faults", _faults(summary.faults)),
        _section("Dangerous states", _states(summary)),
        _section("Workloads", _table(("Workload", "Runs"), [(name, f"{runs:,}") for name, runs in summary.workloads.items()])),
    ]
    return _page(summary_title(summary), parts, command=command, made=made, version=version)


def _verdict(summary: Summary) -> str:
    if summary.violations:
        return f"{summary.violations:,} of {summary.seeds:,} runs broke an invariant"
    if summary.unjudged:
        return "nothing broke, and the output of some sink was compared with nothing"
    return f"every invariant held in {summary.seeds:,} runs"


def render_verdicts(verdicts: Sequence[Verdict], *, command: str, made: str, version: str) -> str:
    """The page of a proof: each sabotage, and how it was caught."""
    missed = [verdict for verdict in verdicts if not verdict.caught_after]
    mark, tone = ("■", "bad") if missed else ("●", "good")
    rows = [
        (each.sabotage, caught(each), each.invariant, ", ".join(each.expected) or "any", each.message.partition("\n")[0])
        for each in verdicts
    ]
    parts = [
        f'<p class="{tone}">{mark} {len(verdicts) - len(missed):,} of {len(verdicts):,} sabotages caught</p>',
        _section("Sabotages", _table(("Sabotage", "Outcome", "By", "Expected", "Message"), rows)),
    ]
    return _page("Sabotages", parts, command=command, made=made, version=version)


def _page(title: str, parts: Iterable[str], *, command: str, made: str, version: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)} · Holdfast</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>\n"
        f'<p class="quiet">{escape(made)}, Holdfast {escape(version)}: <code>{escape(command)}</code></p>\n'
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, *content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{''.join(content)}\n</section>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "") -> str:
    """Cells are texts, or markup of this module."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{escape(cell)}</th>' if at == 0 else f"<td>{cell if isinstance(cell, _Markup) else escape(cell)}</td>"
            for at, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    if not body:
        return '<p class="quiet">none</p>'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption or columns[0])}">{table}</div>'


class _Markup(str):
    """Text that is markup of this module's own."""


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f'<tr><th scope="row">{escape(label)}</th><td>{escape(text)}</td></tr>' for label, text in rows)
    return f"<table><tbody>{body}</tbody></table>"


def _failure(failure: Failure, meanings: Mapping[str, str]) -> str:
    """What broke, the faults that it takes, the run's end, and the command that repeats it."""
    meaning = meanings.get(failure.invariant)
    parts = [f'<p class="bad">■ {escape(failure.invariant)} at {failure.at_ms:,} ms of virtual time</p>']
    parts += [f'<p class="quiet">{escape(meaning)}</p>'] if meaning else []
    parts.append(f'<pre tabindex="0">{escape(failure.message)}</pre>')
    if failure.planned:
        lines = "".join(f'<li value="{index}">{escape(fault.label)}</li>' for index, fault in failure.faults.items())
        parts.append(f"<h3>Faults</h3><p>{escape(faults_heading(failure))}</p><ol>{lines}</ol>")
    if failure.task_failure and failure.task_failure not in failure.events:
        parts.append(f'<h3>Last failure of a subtask</h3><pre tabindex="0">{escape(failure.task_failure)}</pre>')
    if failure.events:
        what = "Events around the cause" if failure.around_cause else "Last events"
        events = escape("\n".join(failure.events))
        parts.append(f'<h3>{what} (ms, process, event)</h3><pre tabindex="0">{events}</pre>')
    parts.append(f"<h3>Again</h3><p><code>{escape(failure.replay)}</code></p>")
    return _section(f"Seed {failure.seed} of {failure.workload}", *parts)


def _faults(faults: Mapping[str, FaultCount]) -> str:
    rows = [(kind, f"{count.planned:,}", f"{count.hit:,}", _share(count.hit, count.planned)) for kind, count in faults.items()]
    return _table(("Kind", "Planned", "Hit", ""), rows, caption="Faults")


def _share(part: int, whole: int) -> _Markup:
    return _Markup(f'<meter min="0" max="{max(1, whole)}" value="{part}" aria-label="hit">{part} of {whole}</meter>')


def _states(summary: Summary) -> str:
    visited = _table(("Visited", "In runs"), [(name, f"{runs:,}") for name, runs in summary.visited.items()])
    never = ", ".join(summary.never_visited)
    return visited + (f'<p class="quiet">Never: {escape(never)}</p>' if never else "")
