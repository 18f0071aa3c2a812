"""TLS of the embedded server: on where strangers could listen, with a certificate that clients check."""

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest

from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.bus.tls import Listening, context
from nexus_bus.errors import Denied, Refused, Unavailable
from tests.conftest import free_port


@pytest.fixture
def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServer]:
    """A server that speaks TLS, with an authority of its own."""
    listening = Listening(tls=True, names=("trainer.example",))
    server = EmbeddedServer(tmp_path / "nats", port=free_port(), listening=listening, authority=tmp_path / "own").start()
    monkeypatch.setenv("NEXUS_CA", str(server.ca))
    yield server
    server.stop()


async def test_who_has_the_authority_gets_in(secured: EmbeddedServer):
    assert secured.url.startswith("tls://")
    bus = await Bus.connect(secured.url, creds=secured.creds)
    assert (await bus.js.account_info()).limits.max_streams == -1
    await bus.close()


async def test_who_has_another_does_not_say_a_word(secured: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "other").mkdir()
    Listening(tls=True).files(tmp_path / "other")
    monkeypatch.setenv("NEXUS_CA", str(tmp_path / "other" / "ca.pem"))
    with pytest.raises(Unavailable, match=r"NEXUS_CA names the ca\.pem"):
        await Bus.connect(secured.url, creds=secured.creds, timeout=6.0)


async def test_nobody_gets_in_in_the_clear(secured: EmbeddedServer):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(secured.url.rpartition(":")[2]))
    greeting = await reader.readline()
    assert b'"tls_required":true' in greeting
    writer.write(b'CONNECT {"verbose":true}\r\nPING\r\n')
    async with asyncio.timeout(30):
        rest = await reader.read()
    assert b"PONG" not in rest
    writer.close()


async def test_a_server_that_does_not_encrypt_is_not_spoken_to_under_tls(server: EmbeddedServer):
    assert server.url.startswith("nats://")
    with pytest.raises(Unavailable, match="does not encrypt"):
        await Bus.connect(server.url.replace("nats://", "tls://"), creds=server.creds, timeout=6.0)


async def test_a_certificate_that_ends_or_lacks_a_name_is_made_anew(secured: EmbeddedServer, tmp_path: Path):
    first = (secured.authority / "server.pem").read_bytes()
    assert Listening(tls=True, names=("trainer.example",)).files(secured.authority)[0].read_bytes() == first
    assert Listening(tls=True, names=("other.example",)).files(secured.authority)[0].read_bytes() != first
    for secret in ("server.key", "ca.key", "operator.nk"):
        assert stat.S_IMODE((secured.authority / secret).stat().st_mode) == 0o600


async def test_a_certificate_of_ones_own(secured: EmbeddedServer, tmp_path: Path):
    listening = Listening(cert=secured.authority / "server.pem", key=secured.authority / "server.key")
    server = EmbeddedServer(tmp_path / "second", port=free_port(), listening=listening).start()
    try:
        assert (server.url.partition(":")[0], server.ca) == ("tls", None)
        client = await nats.connect(
            server.url,
            tls=context(secured.ca),
            user_credentials=str(server.creds),
            allow_reconnect=False,
            connect_timeout=30,
        )
        assert client.is_connected
        await client.close()
    finally:
        server.stop()


def test_tls_is_on_off_the_loopback_interface_and_only_there():
    addresses = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "10.0.0.1", "nats.example")  # noqa: S104 - none is bound
    assert [Listening(address=address).secure for address in addresses] == [False, False, False, True, True, True]
    assert not Listening(address="10.0.0.1", tls=False).secure


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NEXUS_TLS_CERT", "/x")
    with pytest.raises(Refused, match="give both"):
        Listening.from_environment()
    monkeypatch.setenv("NEXUS_TLS_KEY", "/y")
    with pytest.raises(Refused, match="/x cannot be read"):
        Listening.from_environment().files(tmp_path)
    monkeypatch.setenv("NEXUS_TLS", "maybe")
    with pytest.raises(Refused, match="on or off"):
        Listening.from_environment()
    for path in (tmp_path / "none.pem", Path(__file__)):
        with pytest.raises(Denied, match="NEXUS_CA"):
            context(path)
