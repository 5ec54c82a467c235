"""What a secret shows, and where: nowhere but in the process that reads it."""

from __future__ import annotations

import pickle

import pytest

from holdfast.operators.task.user_failures import error_line, frames_text, stack_trace
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.secrets import Secret, hide, hide_resolved, is_secret_name, resolve

CONTENT = "s3cret/with spaces"


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> Secret:
    monkeypatch.setenv("HOLDFAST_TEST_PASSWORD", CONTENT)
    return Secret("HOLDFAST_TEST_PASSWORD")


def test_only_resolve_gives_the_content(secret: Secret) -> None:
    assert secret.resolve() == resolve(secret) == CONTENT
    assert resolve("plain") == "plain"
    assert CONTENT not in repr(secret) + str(secret)


def test_its_pickle_has_the_name_alone(secret: Secret, monkeypatch: pytest.MonkeyPatch) -> None:
    secret.resolve()
    shipped = pickle.dumps(secret)
    assert CONTENT.encode() not in shipped
    monkeypatch.setenv("HOLDFAST_TEST_PASSWORD", "an0ther-one")
    assert pickle.loads(shipped).resolve() == "an0ther-one"  # a word would be hidden in all later texts of the process


SECRETS = """AWS_SECRET_ACCESS_KEY s3.secret-access-key sasl.password db_passwd token sasToken adls.sas-token.shop accountKey
azure_storage_account_key credential AWS_SSE_CUSTOMER_KEY_BASE64 client_secret ssl.key"""
OTHERS = """AWS_ACCESS_KEY_ID s3.access-key-id aws_sse_kms_key_id AWS_SSE_BUCKET_KEY_ENABLED token-refresh-enabled monkey uri
GOOGLE_APPLICATION_CREDENTIALS warehouse gcs.oauth2.token-expires-at AWS_REGION"""


def test_secrets_are_known_by_their_names() -> None:
    assert [name for name in SECRETS.split() if not is_secret_name(name)] == []
    assert [name for name in OTHERS.split() if is_secret_name(name)] == []


def test_it_can_not_be_put_into_a_text(secret: Secret) -> None:
    with pytest.raises(TypeError, match="HOLDFAST_TEST_PASSWORD"):
        f"postgresql://me:{secret}@host/db"


@pytest.mark.parametrize("content", [None, ""])
def test_a_variable_that_is_not_set_is_named(content: str | None, secret: Secret, monkeypatch: pytest.MonkeyPatch) -> None:
    if content is None:
        monkeypatch.delenv("HOLDFAST_TEST_PASSWORD")
    else:
        monkeypatch.setenv("HOLDFAST_TEST_PASSWORD", content)
    with pytest.raises(InvalidConfigError, match="HOLDFAST_TEST_PASSWORD") as raised:
        secret.resolve()
    assert raised.value.setting == "HOLDFAST_TEST_PASSWORD"


@pytest.mark.parametrize("given", ["pass word!", "", "hunter-2", 5])
def test_a_password_in_place_of_a_name_is_refused_and_not_shown(given: object) -> None:
    with pytest.raises(InvalidConfigError) as raised:
        Secret(given)  # type: ignore[arg-type]
    assert not given or str(given) not in str(raised.value)


def test_messages_of_clients_lose_every_secret() -> None:
    text = "auth of 'postgresql://me:pw@host' failed for pw"
    assert hide(text, ["pw", "postgresql://me:pw@host", ""]) == "auth of '***' failed for ***"


@pytest.mark.parametrize(
    ("content", "quoted"),
    [
        (CONTENT, CONTENT),
        ("nats://me:hunter2%2F@host:4222", "hunter2%2F"),
        ("nats://me:hunter2%2F@host:4222", "hunter2/"),
        ("host=db password='it\\'s hunter2' user=me", "it's hunter2"),
        ("postgresql://me@db/shop?password=hunter-2&sslmode=require", "hunter-2"),
    ],
)
def test_a_failure_does_not_tell_what_this_process_has_resolved(
    content: str, quoted: str, secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(secret.variable, content)
    secret.resolve()
    told = [f"login {text!r} of {text} refused" for text in (content, quoted)]
    try:
        try:
            raise ConnectionError(told[0])
        except ConnectionError as error:
            raise RuntimeError(told[1]) from error
    except RuntimeError as error:
        texts = [error_line(error), stack_trace(error), frames_text(error), *map(hide_resolved, told)]
    assert all("refused" in text for text in texts)
    assert not [text for text in texts if content in text or quoted in text]


def test_a_secret_too_short_to_be_one_does_not_change_texts(secret: Secret, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.variable, "e")
    secret.resolve()
    assert hide_resolved("checkpoint 1 failed") == "checkpoint 1 failed"
