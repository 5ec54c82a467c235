from __future__ import annotations

import sys
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.operators.connectors.extras import import_extra


def test_a_client_that_is_not_installed_is_named_with_its_extra() -> None:
    with pytest.raises(hf.InvalidConfigError, match=r"KafkaSink needs no_such_client.*pip install 'holdfast\[kafka\]'"):
        import_extra("no_such_client.part", "kafka", "KafkaSink")


def test_a_defect_of_a_client_itself_is_not_taken_for_a_missing_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_client.py").write_text("import what_it_needs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        import_extra("broken_client", "kafka", "KafkaSink")
    assert "broken_client" not in sys.modules
