"""The UI of a real Flink 2.3: its page and each file that the page names are served."""

from __future__ import annotations

import contextlib
import re

import pytest

from holdfast.api.flink.web_interface import WebInterface
from tests.compat.flink import FLINK

pytestmark = pytest.mark.compat


def test_the_page_and_what_it_names_are_in_the_jar() -> None:
    (jar,) = (FLINK / "lib").glob("flink-dist-*.jar")
    with contextlib.closing(WebInterface(jar)) as web:
        page = web.find("")
        assert page is not None
        named = re.findall(r'(?:src|href)="([^"]+[.](?:js|css|json|png|ico|svg))"', web.read(page).decode())
        assert any(name.endswith(".js") for name in named)
        for name in named:
            found = web.find(name)
            assert found is not None, name
            assert found.media_type != "application/octet-stream"
            assert web.read(found)
