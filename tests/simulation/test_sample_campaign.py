"""The campaign that README and docs/chaos.md show is of these workloads and states, and the same in both."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from holdfast.chaos.campaign.catalogue import entries
from holdfast.chaos.workloads import ON_DEMAND

ROOT = Path(__file__).resolve().parents[2]


def sample(page: str) -> str:
    """What `holdfast chaos sim --seeds 400` prints, as the page has it."""
    found = re.search(r"^400 seeds from 0 over .*?(?=^```$)", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None, page
    return found[0]


def test_both_pages_show_the_same_campaign() -> None:
    assert sample("docs/chaos.md").startswith(sample("README.md"))


def test_it_is_a_campaign_over_what_there_is_now() -> None:
    shown = sample("docs/chaos.md")
    workloads = [name for name, _ in entries("workloads") if name not in ON_DEMAND]
    assert f"over {len(workloads)} workloads" in shown
    assert f" of {len(entries('sometimes'))} dangerous states" in shown
    never = re.findall(r"[a-z_0-9.]+", shown.partition("never ran ")[2])
    assert len(never) > 30
    assert [module for module in never if importlib.util.find_spec(module) is None] == []


def test_the_number_of_sabotages_is_said_about_right() -> None:
    assert "some 220 safety rules" in (ROOT / "README.md").read_text()
    assert 210 <= len(entries("sabotages")) < 230
