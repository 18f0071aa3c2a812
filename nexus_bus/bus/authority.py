"""The operator: one secret key, from which everything that the server trusts is signed.

Accounts are three kinds. The system account changes the others while the server runs. The provider's holds all streams and all
workers. Each tenant's holds nothing: no stream, no consumer, only the calls of the gateway, imported one by one under short
names. What a tenant publishes on `job.submit` arrives at the provider as `tenant.acme.job.submit`; the name stands in the
account's token, which only the operator signs, so no message can lie about who sent it.

Keys of accounts are derived from the operator's: one file is the whole secret, and nothing about a tenant lies on a disk.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus_bus.bus.jwt import Key, creds_text, issued_at, mint, unix_now
from nexus_bus.errors import Denied
from schemas.subjects import ASK_EXPORT, CALLS, EVENTS_EXPORT
from schemas.tenant import TenantRecord

OPERATOR_FILE, PROVIDER_FILE, SYSTEM_FILE = "operator.nk", "provider.creds", "system.creds"
FOR_EVER = 2**53  # a revocation names what was issued up to then, and clocks differ
_NO_LIMITS = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1, "wildcards": True}
# What comes to tenants unasked: its name, the provider's subjects, the tenant's own.
_HEARD = (("events", EVENTS_EXPORT, "event.>"), ("asks", ASK_EXPORT, "ask.>"))
_ANYTHING: dict[str, Any] = {"pub": {}, "sub": {}}


@dataclass(frozen=True)
class Authority:
    """Everything an operator can sign."""

    operator: Key

    @classmethod
    def at(cls, directory: Path) -> "Authority":
        """The one kept in a directory, made on the first call. The files are readable by their owner only.

        Raises:
            Denied: the key's file is damaged.
        """
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = directory / OPERATOR_FILE
        if not path.exists():
            made = _private(directory / f".{OPERATOR_FILE}.{os.getpid()}", Key.new("operator").seed + "\n")
            with contextlib.suppress(FileExistsError):  # of two that begin at once one wins
                os.link(made, path)
            made.unlink()
        try:
            authority = cls(Key.of_seed(path.read_text(errors="replace").strip(), "operator"))
        except OSError as error:
            raise Denied(f"{path}: {error.strerror or error}") from None
        except Denied as error:
            raise Denied(f"{path}: {error}; restore it from a backup: without it no tenant can be added") from None
        for name, text in ((PROVIDER_FILE, authority.provider_creds()), (SYSTEM_FILE, authority.system_creds())):
            if not (directory / name).exists():
                made = _private(directory / f".{name}.{os.getpid()}", text)
                made.replace(directory / name)
        return authority

    @classmethod
    def kept(cls, directory: Path) -> "Authority":
        """The one kept in a directory. Raises Denied if there is none: making another here would help nobody."""
        if not (directory / OPERATOR_FILE).is_file():
            raise Denied(
                f"{directory}: no operator's key ({OPERATOR_FILE}); run this where `nexus up` made it, or name its directory "
                "by NEXUS_AUTHORITY"
            )
        return cls.at(directory)

    @property
    def system(self) -> Key:
        """Of the system account."""
        return self.operator.derive("account", "system")

    @property
    def provider(self) -> Key:
        """Of the account with all streams and workers."""
        return self.operator.derive("account", "provider")

    def tenant(self, name: str) -> Key:
        """Of a tenant's account. A name is never given twice, so neither is its key."""
        return self.operator.derive("account", f"tenant {name}")

    # Tokens

    def server_config(self, directory: Path) -> str:
        """What a server has to be told: whom it trusts, and where it keeps the tokens of accounts.

        Of two tokens a server that starts keeps the later one. Where its directory is at hand, and a clock has gone back since,
        this makes them later than those kept there.
        """
        kept = (_kept(directory, account) for account in (self.system, self.provider))
        issued = max(unix_now(), *(at + 1 for at in kept))
        claims = {"type": "operator", "system_account": self.system.public}
        operator = mint(self.operator, self.operator.public, "nexus-bus", claims, issued=issued)
        system, provider = self._system_token(issued), self._provider_token(issued)
        # Nodes compare accounts every few seconds: one that was away must not let in whose key became void meanwhile.
        return (
            f"operator: {operator}\nsystem_account: {self.system.public}\n"
            f'resolver: {{ type: full, dir: "{directory}", allow_delete: true, interval: "5s", limit: 1000000 }}\n'
            f"resolver_preload: {{\n  {self.system.public}: {system}\n  {self.provider.public}: {provider}\n}}\n"
        )

    def _system_token(self, issued: int) -> str:
        return mint(self.operator, self.system.public, "system", _account(_NO_LIMITS), issued=issued)

    def _provider_token(self, issued: int) -> str:
        exports = [
            {"name": call.local, "subject": call.wildcard, "type": "service", "response_type": "Singleton"} for call in CALLS
        ] + [{"name": name, "subject": what.format(tenant="*"), "type": "stream"} for name, what, _ in _HEARD]
        storage = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
        return mint(self.operator, self.provider.public, "provider", _account(_NO_LIMITS | storage, exports), issued=issued)

    def tenant_token(self, record: TenantRecord) -> str:
        """A tenant's account as its record says: its calls, answers and events, and nothing else; suspended, not even those."""
        limits = _NO_LIMITS | {
            "payload": record.limits.payload_bytes,
            "conn": record.limits.connections if record.phase == "active" else 0,
            "subs": record.limits.subscriptions,
            "exports": 0,
        }
        imports: list[dict[str, Any]] = []
        if record.phase == "active":
            account = self.provider.public
            imports = [
                {
                    "name": call.local, "account": account, "subject": call.subject(tenant=record.name),
                    "local_subject": call.local, "type": "service", "share": True,
                }
                for call in CALLS
            ]  # fmt: skip
            imports += [
                {
                    "name": name, "account": account, "subject": what.format(tenant=record.name), "local_subject": local,
                    "type": "stream",
                }
                for name, what, local in _HEARD
            ]  # fmt: skip
        claims = _account(limits, imports=imports) | ({"revocations": record.revoked} if record.revoked else {})
        # Of every user without permissions of its own, which is all of them: a new call needs no new credentials.
        claims["default_permissions"] = {
            "pub": {"allow": [call.local for call in CALLS]},
            "sub": {"allow": ["_INBOX.>", *(local for _, _, local in _HEARD)]},
        }  # fmt: skip
        return mint(self.operator, record.account, record.name, claims, issued=record.issued)

    def tenant_creds(self, record: TenantRecord, key: Key, *, issued: int, expires: int | None = None) -> str:
        """Credentials with which a user speaks for a tenant; what it may do, its account says."""
        claims = _ANYTHING | {"type": "user", "subs": -1, "data": -1, "payload": -1, "tags": [f"tenant:{record.name}"]}
        return creds_text(mint(self.tenant(record.name), key.public, record.name, claims, issued=issued, expires=expires), key)

    def deletion(self, account: str) -> str:
        """An order to the server to forget an account (its public key)."""
        claims = {"type": "generic", "accounts": [account]}
        return mint(self.operator, self.operator.public, "deletion", claims, issued=unix_now())

    def provider_creds(self, name: str = "provider") -> str:
        """Credentials of workers and of whoever runs the service."""
        return self._free(self.provider, name)

    def system_creds(self) -> str:
        """Credentials for changing accounts."""
        return self._free(self.system, "system")

    def _free(self, account: Key, name: str) -> str:
        key = self.operator.derive("user", name)
        claims = _ANYTHING | {"type": "user", "subs": -1, "data": -1, "payload": -1}
        return creds_text(mint(account, key.public, name, claims, issued=unix_now()), key)


def _account(
    limits: dict[str, Any], exports: list[dict[str, Any]] | None = None, imports: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {"type": "account", "limits": limits, "exports": exports or [], "imports": imports or []} | {
        "default_permissions": _ANYTHING
    }


def _kept(directory: Path, account: Key) -> int:
    """When the token of an account that a server keeps was issued; 0 where it keeps none."""
    try:
        return issued_at((directory / f"{account.public}.jwt").read_text())
    except (OSError, UnicodeDecodeError):
        return 0


def _private(path: Path, text: str) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return path
