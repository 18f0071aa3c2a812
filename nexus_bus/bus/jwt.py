"""NATS tokens (JWT v2, signed by ed25519 nkeys): keys, minting, and `.creds` files. Nothing here talks to a server.

Form of keys and tokens: https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/jwt and the
`nats-io/nkeys`, `nats-io/jwt` repositories.
"""

import base64
import hashlib
import hmac
import json
import os
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from nexus_bus.errors import Denied

Kind = Literal["operator", "account", "user"]

_PREFIX: dict[Kind, int] = {"operator": 14 << 3, "account": 0, "user": 20 << 3}
_SEED = 18 << 3
_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_BLOCK = re.compile(r"-{3,}BEGIN (?P<what>[A-Z ]+)-{3,}\s*(?P<body>[A-Za-z0-9_.=-]+)\s*-{3,}END (?P=what)-{3,}")
CREDS_BYTES = 64 << 10  # a file that is larger is no .creds file


def _crc16(data: bytes) -> int:
    """CRC-16/XMODEM, which nkeys end with."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1) ^ 0x1021 if crc & 0x8000 else crc << 1
        crc &= 0xFFFF
    return crc


def _text(body: bytes) -> str:
    return base64.b32encode(body + _crc16(body).to_bytes(2, "little")).rstrip(b"=").decode()


class Key:
    """A key pair of an operator, an account or a user."""

    def __init__(self, kind: Kind, raw: bytes) -> None:
        """From 32 bytes of secret."""
        from nacl.signing import SigningKey

        prefix = _PREFIX[kind]
        self.kind: Kind = kind
        self.raw = raw
        self._signing = SigningKey(raw)
        self.seed = _text(bytes([_SEED | prefix >> 5, (prefix & 31) << 3]) + raw)
        self.public = _text(bytes([prefix]) + bytes(self._signing.verify_key))

    @classmethod
    def new(cls, kind: Kind) -> "Key":
        """A fresh one."""
        return cls(kind, os.urandom(32))

    @classmethod
    def of_seed(cls, seed: str, wanted: Kind = "user") -> "Key":
        """From its text form. Raises Denied if it is none, or of another kind."""
        try:
            body = base64.b32decode(seed + "=" * (-len(seed) % 8))
        except ValueError:
            body = b""
        kinds: dict[int, Kind] = {prefix: kind for kind, prefix in _PREFIX.items()}
        if len(body) != 36 or body[0] & 0xF8 != _SEED or _crc16(body[:-2]) != int.from_bytes(body[-2:], "little"):
            raise Denied("a key's seed is damaged or cut short")
        kind = kinds.get((body[0] & 7) << 5 | body[1] >> 3)
        if kind != wanted:
            raise Denied(f"a key's seed is of {kind or 'an unknown kind'}, not of {wanted}")
        return cls(wanted, body[2:34])

    def derive(self, kind: Kind, purpose: str) -> "Key":
        """Another key that whoever has this one can make again: HMAC-SHA256 of the purpose."""
        return Key(kind, hmac.digest(self.raw, f"nexus-bus {kind} {purpose}".encode(), "sha256"))

    def sign(self, data: bytes) -> bytes:
        """64 bytes."""
        return self._signing.sign(data).signature


def mint(signer: Key, subject: str, name: str, nats: dict[str, Any], *, issued: int, expires: int | None = None) -> str:
    """A signed token about `subject` (a public key).

    Args:
        nats: the claims of its kind.
        issued: unix time. Of two tokens of one account a server may prefer the later.
        expires: unix time.
    """
    claims: dict[str, Any] = {
        "iat": issued, "iss": signer.public, "name": name, "sub": subject, "nats": nats | {"version": 2},
    }  # fmt: skip
    if expires is not None:
        claims["exp"] = expires
    digest = hashlib.sha256(json.dumps(claims, sort_keys=True).encode()).digest()
    claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
    body = f"{_part(_HEADER)}.{_part(claims)}"
    return f"{body}.{base64.urlsafe_b64encode(signer.sign(body.encode())).rstrip(b'=').decode()}"


def _part(content: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(content, separators=(",", ":")).encode()).rstrip(b"=").decode()


class _UserClaims(msgspec.Struct):
    tags: list[str] = []
    issuer_account: str = ""
    type: str = ""


class _Claims(msgspec.Struct):
    iss: str
    sub: str
    name: str = ""
    iat: int = 0
    exp: int | None = None
    nats: _UserClaims = msgspec.field(default_factory=_UserClaims)


def _claims(token: str) -> _Claims:
    """What a token says, whoever signed it. Raises ValueError if it is none."""
    try:
        body = token.split(".")[1]
        return msgspec.json.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=_Claims)
    except (IndexError, msgspec.MsgspecError) as error:
        raise ValueError(f"no token: {error}") from None


def contents(token: str) -> dict[str, Any]:
    """All that a token says; nothing, if it is none."""
    try:
        body = token.split(".")[1]
        found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (IndexError, ValueError):
        return {}
    return found


def issued_at(token: str) -> int:
    """Unix time at which a token says it was made; 0 if it is none."""
    try:
        return _claims(token).iat
    except ValueError:
        return 0


@dataclass(frozen=True)
class Credentials:
    """What a `.creds` file holds. The server judges it; what stands here is only for choosing what to ask."""

    text: str
    source: str  # the file, for errors
    tenant: str | None  # whom it speaks for; None: the provider
    user: str  # public key
    expires: int | None  # unix time


def creds_text(token: str, key: Key) -> str:
    """A `.creds` file as the `nats` tool and every client reads it."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        "************************* IMPORTANT *************************\n"
        "NKEY Seed printed below can be used to sign and prove identity.\n"
        "NKEYs are sensitive and should be treated as secrets.\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{key.seed}\n------END USER NKEY SEED------\n"
    )


def read_creds(path: str | Path) -> Credentials:
    """Read and check a `.creds` file.

    Raises:
        Denied: it is missing, unreadable, half written, or its key is not its token's; says what to do.
    """
    advice = "ask the provider for another (`nexus tenant rotate`)"
    try:
        with Path(path).open("rb") as file:
            text = file.read(CREDS_BYTES + 1).decode("ascii")
    except OSError as error:
        raise Denied(f"credentials {path}: {error.strerror or error}; NEXUS_CREDS or --creds names the file") from None
    except UnicodeDecodeError:
        raise Denied(f"credentials {path}: this is no .creds file; {advice}") from None
    blocks = {match["what"]: match["body"] for match in _BLOCK.finditer(text)}
    token, seed = blocks.get("NATS USER JWT"), blocks.get("USER NKEY SEED")
    if len(text) > CREDS_BYTES or token is None or seed is None:
        missing = "its token" if token is None else "its key" if seed is None else "nothing but is too long"
        raise Denied(f"credentials {path}: no whole .creds file, it lacks {missing}; {advice}")
    try:
        claims = _claims(token)
    except ValueError:
        raise Denied(f"credentials {path}: its token is damaged or cut short; {advice}") from None
    try:
        key = Key.of_seed(seed)
    except Denied as error:
        raise Denied(f"credentials {path}: {error}; {advice}") from None
    if key.public != claims.sub:
        raise Denied(f"credentials {path}: its key belongs to another token; {advice}")
    named = next((tag.removeprefix("tenant:") for tag in claims.nats.tags if tag.startswith("tenant:")), None)
    return Credentials(text, str(path), named, claims.sub, claims.exp)


def denial(text: str, creds: Credentials | None, url: str) -> str:
    """What to tell a person whom the server turned away; empty for every other error."""
    lowered = text.lower()
    if "connections exceeded" in lowered:
        return (
            f"{url}: no further connection for this tenant: as many connections as this tenant may have are open, or it is "
            "suspended; close one, or ask the provider"
        )
    if not any(word in lowered for word in ("authorization", "authentication")):
        return ""
    if creds is None:
        return f"{url}: the server asks for credentials; NEXUS_CREDS or --creds names a .creds file"
    when = ""
    if creds.expires is not None:
        when = f" (they expire on {datetime.fromtimestamp(creds.expires, UTC).isoformat()[:19]})"
    return f"{creds.source}: the server does not accept these credentials{when}: expired, revoked, or of another server"


def unix_now() -> int:
    """Seconds since 1970, by this machine's clock."""
    return int(time.time())
