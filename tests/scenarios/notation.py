"""The notation of section 0: what arrives at a gate, and the trace that is expected of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tests.scenarios.tables import UnparsedError

DASHES = str.maketrans({"−": "-", "‐": "-", "‑": "-", "–": "-", "—": "-", "\u00a0": " "})
ELLIPSIS = r"\s*(?:…|\.{2,3}|\bto\b|-)\s*"
CHANNELS = r"([a-z](?:\s*(?:,|and|&)\s*[a-z])*)\b"
EMPTY = re.compile(r"^(?:-+|∅|\(?(?:none|nothing|empty)\)?)?$", re.IGNORECASE)

PHRASE = re.compile(
    r"(?:the\s+)?(?:first\s+)?(barriers?|cancel\s+markers?|markers?)\s+(?:of\s+|for\s+)?(?:the\s+)?(?:(?:checkpoints?|ids?)\s+)?"
    rf"(\d+)(?:{ELLIPSIS}(\d+))?\s+(?:arriv\w+\s+)?on\s+(?:channels?\s+)?{CHANNELS}(?:\s+only)?",
    re.IGNORECASE,
)
"""`barriers of ids 1…60 on a only` and the like."""

TOKEN_RANGE = re.compile(rf"\b([BX])(\d+)(?:\.([a-z]))?{ELLIPSIS}\1?(\d+)\.([a-z])\b|\b([a-z])(\d+){ELLIPSIS}\6?(\d+)\b")
"""`B1…B60.a`, `a1…a9`."""

AFTER_FINISH = re.compile(
    r"(?:checkpoints?[- ])?after[- ](?:tasks?[- ])?finish(?:ed)?\W*(on|off|true|false|enabled|disabled)", re.IGNORECASE
)

FILLER = re.compile(r"\b(?:then|and|followed|by|finally|next|after|that|events?)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Event:
    """One token of the input. kind: record | restored | barrier | savepoint | cancel | end | clock, with a channel and a number
    (record, checkpoint id or time); call | return: one long call of the user's function begins or ends."""

    kind: str
    channel: int
    number: int


@dataclass(frozen=True)
class Trace:
    """An expected trace: marks and records in order, and what the row says of the end."""

    tokens: tuple[str, ...]
    held: tuple[str, ...] | None = None
    pending: tuple[int, ...] | None = None


@dataclass
class Cut:
    """Records in a snapshot, by channel letter."""

    counts: dict[str, int] = field(default_factory=dict)


def plain(cell: str) -> str:
    """A cell without quotes, with one kind of dash."""
    return cell.translate(DASHES).replace("`", " ").replace("\\|", "|").strip()


def is_empty(cell: str) -> bool:
    return EMPTY.match(plain(cell)) is not None


def channel_index(letter: str) -> int:
    return ord(letter) - ord("a")


def channel_letter(index: int) -> str:
    return chr(ord("a") + index)


def parse_setting(cell: str) -> tuple[int | None, bool]:
    """Channels and checkpoints-after-finish of an n column: `3`, `2, after-finish off`."""
    text = plain(cell).lower()
    count = re.search(r"\d+", text)
    option = re.sub(r"^\W*\d*\W*(?:channels?)?\W*", "", text).strip()
    after_finish = True
    if option:
        told = AFTER_FINISH.search(option)
        if told is None or re.sub(r"[\s.,;()]", "", option.replace(told.group(0), "")):
            raise UnparsedError(f"unknown option {option!r}")
        after_finish = told.group(1) in ("on", "true", "enabled")
    return (int(count.group()) if count else None), after_finish


def parse_input(cell: str) -> list[Event]:
    """The events of an input cell. Raises UnparsedError naming the first token that is none."""
    text = TOKEN_RANGE.sub(_expand_range, PHRASE.sub(_expand_phrase, plain(cell)))
    text = re.sub(r"([()])", r" \1 ", FILLER.sub(" ", text))
    events = []
    for token in re.split(r"[\s,;]+", text):
        if token.strip("."):
            events.append(parse_event(token.rstrip(".")))
    return events


def parse_event(token: str) -> Event:
    if token in ("(", ")"):
        return Event("call" if token == "(" else "return", -1, 0)
    if found := re.fullmatch(r"\^([a-z])(\d+)", token):
        return Event("restored", channel_index(found.group(1)), int(found.group(2)))
    if found := re.fullmatch(r"([BXS])(\d+)\.([a-z])", token):
        kind = {"B": "barrier", "S": "savepoint", "X": "cancel"}[found.group(1)]
        return Event(kind, channel_index(found.group(3)), int(found.group(2)))
    if found := re.fullmatch(r"E\.([a-z])", token):
        return Event("end", channel_index(found.group(1)), 0)
    if found := re.fullmatch(r"([a-z])(\d+)", token):
        return Event("record", channel_index(found.group(1)), int(found.group(2)))
    if found := re.fullmatch(r"@(\d+)", token):
        return Event("clock", -1, int(found.group(1)))
    raise UnparsedError(f"unknown event {token!r}")


def _span(first: str, last: str | None) -> range:
    start, stop = int(first), int(last or first)
    return range(start, stop + 1) if stop >= start else range(start, stop - 1, -1)


def _expand_phrase(found: re.Match[str]) -> str:
    sign = "B" if found.group(1).lower().startswith("barrier") else "X"
    channels = re.findall(r"\b[a-z]\b", found.group(4))
    return " ".join(f" {sign}{number}.{channel} " for number in _span(found.group(2), found.group(3)) for channel in channels)


def _expand_range(found: re.Match[str]) -> str:
    if found.group(1):
        sign, channel = found.group(1), found.group(5)
        if found.group(3) not in (None, channel):
            raise UnparsedError(f"a range over two channels: {found.group(0)!r}")
        return " ".join(f"{sign}{number}.{channel}" for number in _span(found.group(2), found.group(4)))
    return " ".join(f"{found.group(6)}{number}" for number in _span(found.group(7), found.group(8)))


def parse_trace(cell: str) -> Trace:
    """An expected trace. A parenthesis may say what is pending and what is held at the end; another one is not in the notation."""
    text = plain(cell)
    held: tuple[str, ...] | None = None
    pending: tuple[int, ...] | None = None
    notes = [note.strip() for group in re.findall(r"\(([^)]*)\)", text) for note in group.split(";")]
    for note in notes:
        if found := re.fullmatch(r"(?:still\s+)?held:?\s*(.*)", note):
            held = () if is_empty(found.group(1)) else tuple(re.split(r"[\s,]+", found.group(1).strip()))
        elif found := re.fullmatch(r"(?:still\s+)?pending:?\s*(.*)|([\d\s,]+)\s+(?:still\s+)?pending", note):
            pending = tuple(int(number) for number in re.findall(r"\d+", note))
        elif found := re.fullmatch(r"(?:nothing|none)\s+(?:is\s+)?(held|pending)", note):
            held, pending = (() if found.group(1) == "held" else held), (() if found.group(1) == "pending" else pending)
        else:
            raise UnparsedError(f"unknown note ({note})")
    text = re.sub(r"\([^)]*\)", " ", text)
    if is_empty(text):
        return Trace((), held, pending)
    tokens = [mark(token) for token in re.findall(r"\[[^\]]*\]|[^\s,;\[]+", text)]
    return Trace(tuple(tokens), held, pending)


def mark(token: str) -> str:
    """A token of a trace in one spelling."""
    if not token.startswith("["):
        parse_event(token)
        return token
    found = re.fullmatch(r"\[\s*([TACU])\s*(\d+)\s*[,:]?\s*([^\]]*?)\s*\]", token)
    if found is None:
        raise UnparsedError(f"unknown mark {token!r}")
    why = re.sub(r"[\s-]+", " ", found.group(3))
    return f"[{found.group(1)}{found.group(2)}{' ' + why if why else ''}]"


def parse_cuts(cell: str) -> dict[int, dict[str, int]]:
    """`T1: a1 b2; T2: a1 b3` -> records per channel, by checkpoint id. Channels not named are not compared."""
    text = plain(cell)
    if is_empty(text):
        return {}
    cuts: dict[int, dict[str, int]] = {}
    parts = re.split(r"\[?T(\d+)\]?\s*[:=]?", text)
    if parts[0].strip(" ;,"):
        raise UnparsedError(f"a cut must begin with its checkpoint: {cell!r}")
    for checkpoint_id, counts in zip(parts[1::2], parts[2::2], strict=True):
        cut: dict[str, int] = {}
        for token in re.split(r"[\s,;]+", counts):
            if not token:
                continue
            found = re.fullmatch(r"([a-z])(\d+)", token)
            if found is None:
                raise UnparsedError(f"unknown count {token!r} in the cut {cell!r}")
            cut[found.group(1)] = int(found.group(2))
        cuts[int(checkpoint_id)] = cut
    return cuts


def parse_times(cell: str) -> dict[int, int]:
    """`1@0, 2@30` -> time by checkpoint id."""
    text = plain(cell)
    if is_empty(text):
        return {}
    parts = [re.fullmatch(r"(\d+)\s*@\s*(\d+)", part) for part in re.split(r"[\s,;]+", text) if part]
    if None in parts:
        raise UnparsedError(f"unknown time in {cell!r}")
    return {int(part.group(1)): int(part.group(2)) for part in parts if part is not None}


def parse_in_flight(cell: str) -> dict[int, list[str]]:
    """`1: {b1 b2}; 2: {}` -> records by checkpoint id."""
    text = plain(cell)
    if is_empty(text):
        return {}
    found = re.findall(r"(\d+)\s*:\s*\{([^}]*)\}", text)
    if re.sub(r"(\d+)\s*:\s*\{([^}]*)\}|[\s;,]", "", text):
        raise UnparsedError(f"unknown in-flight data {cell!r}")
    return {int(number): records.replace(",", " ").split() for number, records in found}
