"""Where in the user's code an exception was raised: its frames, as Python prints them, and none of ours.

A worker tells file and line; the driver adds the source line where the worker could not read the file (a notebook's cell, a program
that is on the driver alone)."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from types import TracebackType

from holdfast.barriers.messages import printable
from holdfast.operators.pickling import is_own_module
from holdfast.statebackends.errors import HoldfastError

FRAMES_MAX = 12
"""Frames that are shown of one exception: a recursion has a thousand."""
CAUSES_MAX = 3
"""Exceptions that are shown behind the first one."""
MESSAGE_CHARACTERS_MAX = 2_000
"""Of each exception that is shown with its frames."""

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$')
_LIBRARIES = tuple(path for key in ("stdlib", "platstdlib") if (path := sysconfig.get_path(key)))


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames of the exception that are not ours, outermost first; empty if a function of C raised it."""
    return [summary for summary, is_ours in _frames(error.__traceback__) if not is_ours]


def _frames(trace: TracebackType | None) -> list[tuple[traceback.FrameSummary, bool]]:
    pairs = list(traceback.walk_tb(trace))
    summaries = traceback.StackSummary.extract(iter(pairs))
    ours = [is_own_module(str(frame.f_globals.get("__name__", ""))) for frame, _ in pairs]
    return [
        (summary, is_own or summary.filename.startswith("<frozen "))
        for summary, is_own in zip(summaries, ours, strict=True)
    ]


def place_of_error(error: BaseException, function: Callable[..., object] | None = None) -> str:
    """`spending.py:24`: the user's innermost line, which is not a library's; else where `function` is defined; else empty."""
    frames = user_frames(error)
    own = [frame for frame in frames if not _is_library(frame.filename)] or frames
    if own:
        return f"{_basename(own[-1].filename)}:{own[-1].lineno}"
    return place_of_function(function)


def place_of_function(function: Callable[..., object] | None) -> str:
    """`spending.py:20`: where it is defined; empty for what is not written in Python."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f"{_basename(code.co_filename)}:{code.co_firstlineno}"


def frames_text(error: BaseException) -> str:
    """The frames of an exception and of those that it was raised from, as lines of a traceback; empty if there are none."""
    lines = _frame_lines(error)
    seen, cause = {id(error)}, _cause(error)
    while cause is not None and id(cause) not in seen and len(seen) <= CAUSES_MAX:
        lines += [text_lines(f"caused by {type(cause).__name__}: {message_of(cause)}"), *_frame_lines(cause)]
        seen.add(id(cause))
        cause = _cause(cause)
    return "\n".join(lines)


def message_of(error: BaseException) -> str:
    """Its text; an exception whose `str` raises has none, and hides nothing."""
    try:
        return str(error)[:MESSAGE_CHARACTERS_MAX]
    except Exception as failure:
        return f"<its text raises {type(failure).__name__}>"


def text_lines(text: str) -> str:
    """A text of somebody else's, a row's perhaps, as it may stand among frames: it steers no terminal, and its lines behind the
    first stand behind a bar, so that none looks like a frame."""
    return "\n  | ".join(printable(line, keep="\t") for line in text.replace("\r\n", "\n").split("\n"))


def with_source_lines(text: str) -> str:
    """The same frames with the source lines that are missing, as far as this process knows them; cells by their number."""
    lines = text.splitlines()
    found: list[str] = []
    for index, line in enumerate(lines):
        match = _FRAME.match(line)
        if match is None:
            found.append(line)
            continue
        file, number, name = match["file"], int(match["line"]), match["name"]
        cell = _cell(file)
        found.append(f"  {cell}, line {number}, in {name}" if cell else line)
        if index + 1 == len(lines) or not lines[index + 1].startswith("    "):
            source = _source_line(file, number)
            found += [f"    {source}"] if source else []
    return "\n".join(found)


def _source_line(file: str, number: int) -> str:
    """Of a cell, or of a module that this process has loaded: what a row made of its text names no other file to be opened."""
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return linecache.getline(file, number).strip() if file in linecache.cache or file in loaded else ""


def _frame_lines(error: BaseException) -> list[str]:
    lines: list[str] = []
    frames = user_frames(error)
    left_out = len(frames) - FRAMES_MAX
    for index, frame in enumerate(frames):
        if left_out > 0 and FRAMES_MAX // 3 <= index < FRAMES_MAX // 3 + left_out:
            if index == FRAMES_MAX // 3:
                lines.append(f"  ... {left_out} more frames ...")
            continue
        lines.append(f'  File "{printable(frame.filename)}", line {frame.lineno}, in {printable(frame.name)}')
        if frame.line:
            lines.append(f"    {printable(frame.line.strip())}")
    return lines


def _cause(error: BaseException) -> BaseException | None:
    """None behind an error of ours: how we came to it is no concern of the user's."""
    if isinstance(error, HoldfastError):
        return None
    if error.__cause__ is not None:
        return error.__cause__
    return None if error.__suppress_context__ else error.__context__


def _is_library(filename: str) -> bool:
    return filename.startswith(("<", *_LIBRARIES)) or "site-packages" in filename or "dist-packages" in filename


def _basename(filename: str) -> str:
    return filename.replace("\\", "/").rpartition("/")[2]


def _cell(filename: str) -> str:
    """`Cell In[3]` for the code of a notebook's cell that this process runs."""
    if "IPython" not in sys.modules:
        return ""
    try:
        label, name = sys.modules["IPython"].get_ipython().compile.format_code_name(filename)
    except Exception:  # no notebook, another shell, or not one of its cells
        return ""
    return f"{label} {name}" if label == "Cell" else ""
