"""Whom a client asks next: the leader that it is sent to, or the address again."""

from __future__ import annotations

import pytest

from holdfast.operators.worker.leader_retrieval import (
    FOLLOWED_MAX,
    MEMBERS_MAX,
    SILENT_ROUNDS,
    MemberAddresses,
    Target,
    is_safe_step,
    next_target,
    split_urls,
)
from holdfast.statebackends.errors import HoldfastError, NotFoundError, NotLeaderError, StorageUnavailableError

ADDRESS = "http://10.0.0.1:7000"
SECOND = "http://10.0.0.2:7000"
THIRD = "http://10.0.0.3:7000"


def led_by(url: object, epoch: object) -> NotLeaderError:
    return NotLeaderError("led elsewhere", job="j", url=url, epoch=epoch)  # type: ignore[arg-type]


def after(target: Target, error: HoldfastError | None, address: str = ADDRESS) -> Target:
    return next_target(target, error, lambda: address)


def test_the_leader_that_is_named_is_asked() -> None:
    assert after(Target(ADDRESS), led_by(f"{SECOND}/", 4)) == Target(SECOND, 4, followed=1)


def test_a_leader_that_another_one_followed_sends_on() -> None:
    assert after(Target(SECOND, 4, followed=1), led_by(THIRD, 5)) == Target(THIRD, 5, followed=2)


@pytest.mark.parametrize("epoch", [3, 4])
def test_epochs_only_rise_so_that_nobody_is_sent_to_and_fro(epoch: int) -> None:
    assert after(Target(SECOND, 4), led_by(THIRD, epoch)).url == ADDRESS


def test_two_that_name_each_other_are_left_after_one_round() -> None:
    target, asked = Target(ADDRESS), [ADDRESS]
    for _ in range(10):
        following = after(target, led_by(SECOND if target.url == ADDRESS else ADDRESS, 4))
        if following.epoch <= target.epoch:
            break
        target = following
        asked.append(target.url)
    assert asked == [ADDRESS, SECOND]


def test_a_chain_without_end_is_left() -> None:
    target = Target(ADDRESS)
    for epoch in range(1, FOLLOWED_MAX + 1):
        target = after(target, led_by(f"http://10.0.1.{epoch}:1", epoch))
        assert target.epoch == epoch
    assert after(target, led_by(SECOND, 99)) == Target(ADDRESS, unreachable_epoch=FOLLOWED_MAX)


def test_a_leader_that_does_not_answer_is_told_to_whoever_is_at_the_address() -> None:
    assert after(Target(SECOND, 4, followed=1), None) == Target(ADDRESS, unreachable_epoch=4)
    assert after(Target(ADDRESS, unreachable_epoch=4), led_by(SECOND, 4)) == Target(SECOND, 4, 4, 1)


def test_a_leader_that_leads_no_more_and_names_nobody_counts_as_unreachable() -> None:
    assert after(Target(SECOND, 4), NotLeaderError("stopping")) == Target(ADDRESS, unreachable_epoch=4)


def test_a_leader_that_can_not_serve_just_now_is_still_one() -> None:
    assert after(Target(SECOND, 4), StorageUnavailableError("disk full")) == Target(ADDRESS)
    assert after(Target(SECOND, 4), NotFoundError("no such job")) == Target(ADDRESS)


@pytest.mark.parametrize("error", [StorageUnavailableError("disk full"), NotFoundError("no such checkpoint")])
def test_a_leader_that_was_reached_after_all_is_not_called_unreachable(error: HoldfastError) -> None:
    """Whoever is at the address would take its job from it, for a connection that failed long ago."""
    at_leader = after(after(Target(SECOND, 4, followed=1), None), led_by(SECOND, 4))
    assert at_leader == Target(SECOND, 4, unreachable_epoch=4, followed=1)
    assert after(at_leader, error) == Target(ADDRESS)
    assert after(Target(ADDRESS, unreachable_epoch=4), error) == Target(ADDRESS, unreachable_epoch=4), "it was not asked"


def test_who_was_not_sent_anywhere_reads_the_address_again() -> None:
    assert after(Target(ADDRESS), None, address=SECOND) == Target(SECOND)


@pytest.mark.parametrize(
    ("url", "epoch"), [(None, 4), ("", 4), (SECOND, None), (SECOND, "4"), ("http://[", 4), ("/v1", 4), (ADDRESS, 4)]
)
def test_what_names_no_other_leader_is_not_followed(url: object, epoch: object) -> None:
    assert after(Target(ADDRESS), led_by(url, epoch)) == Target(ADDRESS)


@pytest.mark.parametrize(
    ("before", "then", "safe"),
    [
        ("http://a:1", "http://b:2", True),
        ("http://a:1", "https://b:2", True),
        ("https://a", "https://b", True),
        ("https://a", "http://b", False),
        ("http://a", "file:///etc/passwd", False),
        ("http://a", "ftp://b", False),
        ("http://a", "b:7000", False),
        ("http://10.0.0.1:1", "http://127.0.0.1:1", False),
        ("http://10.0.0.1:1", "http://localhost:1", False),
        ("http://10.0.0.1:1", "http://[::1]:1", False),
        ("http://10.0.0.1:1", "http://localhost.:1", False),
        ("http://10.0.0.1:1", "http://any.localhost:1", False),
        ("http://10.0.0.1:1", "http://0.0.0.0:1", False),
        ("http://10.0.0.1:1", "http://[::]:1", False),
        ("http://10.0.0.1:1", "http://[::ffff:127.0.0.1]:1", False),
        ("http://10.0.0.1:1", "http://127.1:1", False),
        ("http://10.0.0.1:1", "http://0x7f.1:1", False),
        ("http://10.0.0.1:1", "http://2130706433:1", False),
        ("http://10.0.0.1:1", "http://127.example.org:1", True),
        ("http://10.0.0.1:1", "http://[fd00::1]:1", True),
        ("http://127.0.0.1:1", "http://[::1]:2", True),
        ("http://127.0.0.1:1", "http://10.0.0.1:2", True),
    ],
)
def test_a_token_goes_nowhere_less_safe(before: str, then: str, safe: bool) -> None:
    assert is_safe_step(before, then) is safe


# -------------------------------------------------------------------------------------------------------------- members


def active_at(url: object, service_epoch: int) -> NotLeaderError:
    return NotLeaderError("this member stands by", url=url, service_epoch=service_epoch)  # type: ignore[arg-type]


def test_active_member_that_is_named_is_asked() -> None:
    found = after(Target(ADDRESS, unreachable_epoch=7), active_at(f"{SECOND}/", 2))
    assert found == Target(SECOND, unreachable_epoch=7, followed=1, service_epoch=2)


def test_epochs_of_members_are_no_leaders_of_jobs() -> None:
    """Else the next coordinator would be told that the leader of a job does not answer."""
    silent = after(Target(SECOND, service_epoch=2, followed=1), None)
    assert silent == Target(ADDRESS, silent_service_epoch=2)
    assert silent.unreachable_epoch == 0


def test_active_member_that_does_not_answer_is_not_followed_again_but_its_successor_is() -> None:
    silent = Target(ADDRESS, silent_service_epoch=2)
    assert after(silent, active_at(SECOND, 2), address=THIRD) == Target(THIRD, silent_service_epoch=2)
    assert after(silent, active_at(SECOND, 3)) == Target(SECOND, followed=1, service_epoch=3, silent_service_epoch=2)


def test_active_member_that_did_not_answer_at_its_own_address_is_not_followed_to() -> None:
    """One that hangs takes connections, and each request to it takes as long as an answer may."""
    silent = after(Target(SECOND), None, address=THIRD)
    assert after(silent, active_at(SECOND, 2)) == Target(ADDRESS)
    assert after(silent, active_at(ADDRESS, 3)).url == ADDRESS


def test_members_that_name_each_other_are_left_after_one_round() -> None:
    target = after(Target(ADDRESS), active_at(SECOND, 2))
    assert after(target, active_at(ADDRESS, 2), address=THIRD).url == THIRD


@pytest.mark.parametrize("url", [None, 7, "no url", "http://127.0.0.1:1", "ftp://10.0.0.2"])
def test_active_member_where_no_token_may_go_is_not_followed(url: object) -> None:
    assert after(Target(ADDRESS), active_at(url, 2)) == Target(ADDRESS)


def test_job_leader_that_an_active_member_names_is_followed() -> None:
    target = after(Target(ADDRESS), active_at(SECOND, 2))
    assert after(target, led_by(THIRD, 4)).url == THIRD


def test_configured_addresses_are_asked_in_turn() -> None:
    addresses = MemberAddresses(split_urls(f"{ADDRESS}/, {SECOND},,{ADDRESS}"))
    assert [addresses.next(None) for _ in range(4)] == [ADDRESS, SECOND, ADDRESS, SECOND]


def test_what_the_state_directory_says_is_asked_first() -> None:
    addresses = MemberAddresses((ADDRESS, SECOND))
    assert [addresses.next(THIRD) for _ in range(5)] == [THIRD, ADDRESS, SECOND, THIRD, ADDRESS]
    addresses.reached()
    assert addresses.next(SECOND) == SECOND
    alone = MemberAddresses((ADDRESS,))
    assert [alone.next(SECOND) for _ in range(3)] == [SECOND] * 3, "a coordinator that moved is not at its old address"


def test_the_one_that_failed_is_left_out_and_members_come_before_what_was_configured_long_ago() -> None:
    addresses = MemberAddresses((ADDRESS, SECOND))
    assert addresses.next(None, ADDRESS) == SECOND
    addresses.learn([SECOND, THIRD])
    addresses.reached()
    assert addresses.next(SECOND, SECOND) == THIRD
    assert MemberAddresses((ADDRESS,)).next(None, ADDRESS) == ADDRESS, "an only one is asked again"


@pytest.mark.parametrize("recorded", [None, ADDRESS, SECOND])
@pytest.mark.parametrize("first", range(3))
def test_every_one_is_asked_in_a_round_whoever_failed(recorded: str | None, first: int) -> None:
    addresses = MemberAddresses((ADDRESS,))
    addresses.learn([SECOND, THIRD])
    asked = [(ADDRESS, SECOND, THIRD)[first]]
    for _ in range(40):
        asked.append(addresses.next(recorded, asked[-1]))
    for begin in range(len(asked) - 4):
        assert set(asked[begin : begin + 5]) == {ADDRESS, SECOND, THIRD}


def test_members_are_learnt_as_far_as_the_token_may_go() -> None:
    addresses = MemberAddresses((ADDRESS,))
    addresses.learn([ADDRESS, SECOND, "http://127.0.0.1:9", "no url", "http://10.0.0.9:1" + "x" * 4_000, f"{THIRD}/"])
    assert {addresses.next(None) for _ in range(9)} == {ADDRESS, SECOND, THIRD}
    addresses.learn([f"http://10.0.1.1:{port}" for port in range(1, 200)])
    assert len({addresses.next(None) for _ in range(400)}) == MEMBERS_MAX + 1


def test_pause_comes_before_a_round_and_not_within_one() -> None:
    """Members that died before are asked, too: a pause for each would keep a worker for long from the one that took over."""
    addresses = MemberAddresses((ADDRESS,))
    addresses.learn([SECOND, THIRD])
    assert addresses.next(None) == SECOND
    found = [(addresses.next(None, ""), addresses.begins_round) for _ in range(5)]
    assert found == [(THIRD, False), (ADDRESS, False), (SECOND, True), (THIRD, False), (ADDRESS, False)]
    addresses.reached()
    assert (addresses.next(None, ADDRESS), addresses.begins_round) == (SECOND, False)
    alone = MemberAddresses((ADDRESS,))
    assert all((alone.next(None, ADDRESS), alone.begins_round) == (ADDRESS, True) for _ in range(3))


def test_one_that_did_not_answer_in_time_is_asked_every_few_rounds() -> None:
    addresses = MemberAddresses((ADDRESS, SECOND, THIRD))
    addresses.was_silent(ADDRESS)
    asked = [addresses.next(None) for _ in range(4 * SILENT_ROUNDS)]
    first = asked.index(ADDRESS)
    assert 2 * (SILENT_ROUNDS - 1) <= first <= 2 * SILENT_ROUNDS
    assert set(asked[:first]) == {SECOND, THIRD}
    assert addresses.is_silent(ADDRESS)
    addresses.reached()
    assert not addresses.is_silent(ADDRESS)


def test_those_that_are_all_silent_are_asked_all_the_same() -> None:
    addresses = MemberAddresses((ADDRESS, SECOND))
    for _ in range(10):
        addresses.was_silent(ADDRESS)
        addresses.was_silent(SECOND)
        asked = addresses.next(None, ADDRESS)
        assert asked == SECOND
    for port in range(4 * MEMBERS_MAX):
        addresses.was_silent(f"http://10.0.0.1:{port}")
    assert sum(addresses.is_silent(f"http://10.0.0.1:{port}") for port in range(4 * MEMBERS_MAX)) == 2 * MEMBERS_MAX
