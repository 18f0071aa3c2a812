"""THE table: complete rows, subjects that are found again, tokens that cannot break out of their place."""

import pytest

from schemas.subjects import BY_NAME, BY_TYPE, TABLE, SubjectEntry, parse, subject


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_row_says_who_sends_who_takes_and_what_for(row: SubjectEntry) -> None:
    assert row.producer
    assert row.consumer
    assert row.summary.endswith(".")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_delivery_stream_and_reply_agree(row: SubjectEntry) -> None:
    assert (row.stream is not None) == (row.delivery in {"work", "log"})
    assert (row.reply is not None) == (row.delivery == "request")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_subject_is_found_again(row: SubjectEntry) -> None:
    tokens = {token: f"{token}-1" for token in row.tokens}
    text = subject(row.name, **tokens)
    assert parse(text) == (row, tokens)
    assert row.wildcard.count("*") == len(tokens)


def test_names_types_and_shapes_are_unique() -> None:
    assert len(BY_NAME) == len(BY_TYPE) == len(TABLE) == len({row.wildcard for row in TABLE})


def test_everything_a_tenant_owns_carries_the_tenant() -> None:
    beats = {"infer.reply", "env.answered", "trace", "health.beat", "health.exit", "health.known", "host.order", "host.scale"}
    assert [row.name for row in TABLE if "tenant" not in row.tokens and row.name not in beats] == []


@pytest.mark.parametrize("token", ["", "a.b", "*", ">", "A", "a b", "a\n", "-a", "a" * 64])
def test_a_token_that_is_not_a_name_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="tenant"):
        subject("job.submit", tenant=token)


def test_a_missing_token_and_an_unknown_subject_are_errors() -> None:
    with pytest.raises(KeyError, match="job"):
        subject("event", tenant="acme")
    with pytest.raises(KeyError):
        parse("job.submit.acme.more")
