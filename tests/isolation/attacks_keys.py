"""Attacks on who is who: credentials made, edited, borrowed and outlived, accounts declared, and doors meant for servers."""

import asyncio
import base64
import contextlib
import json
import re
from typing import Any

from nexus_bus.bus.jwt import Key, creds_text, mint, unix_now
from tests.isolation.attack import attack
from tests.isolation.attacker import Attacker, Wire
from tests.isolation.siege import INTRUDER, VICTIM, Siege

LIMITS = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1, "wildcards": True}
ANYTHING: dict[str, Any] = {
    "type": "user",
    "pub": {},
    "sub": {},
    "subs": -1,
    "data": -1,
    "payload": -1,
    "tags": [f"tenant:{VICTIM}"],
}


def _token(creds: str) -> str:
    found = re.search(r"BEGIN NATS USER JWT-+\s*(\S+)", creds)
    assert found is not None
    return found[1]


async def _let_in(siege: Siege, *creds: str, **fields: Any) -> str | None:
    """Evidence, if any of some credentials opens the door; and an answer that says why not, beyond that they do not."""

    async def knock(one: str) -> str | None:
        wire = await Wire.open(siege.url)
        try:
            if await wire.login(one, **fields):
                return f"let in: {one[:200]}"
            rest = bytes(wire.said).partition(b"\r\n")[2]
            return None if rest in (b"-ERR 'Authorization Violation'\r\n", b"") else f"was told {rest!r}"
        finally:
            await wire.close()

    return next(filter(None, await asyncio.gather(*map(knock, creds))), None)


def _user(signer: Key, key: Key, **fields: Any) -> str:
    return creds_text(mint(signer, key.public, VICTIM, ANYTHING | fields, issued=unix_now()), key)


def _edited(token: str, **claims: Any) -> str:
    """Other claims under the old signature."""
    head, body, signature = token.split(".")
    content = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))) | claims
    return f"{head}.{base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b'=').decode()}.{signature}"


@attack("No credentials, a name and a password, a token, a bare key.")
async def without_credentials(siege: Siege, _intruder: Attacker) -> str | None:
    for fields in (
        {},
        {"user": VICTIM, "pass": ""},
        {"user": "admin", "pass": "admin"},
        {"auth_token": "s3cr3t"},
        {"user": "$SYS"},
    ):
        if evidence := await _let_in(siege, "", **fields):
            return evidence
    wire = await Wire.open(siege.url)
    key = Key.new("user")
    sig = base64.urlsafe_b64encode(key.sign(wire.info["nonce"].encode())).rstrip(b"=").decode()
    known = await wire.connect({"nkey": siege.keys[VICTIM].record.keys[0].key, "sig": sig})
    await wire.close()
    return "let in by a bare key" if known else None


@attack("Work before any greeting: subscriptions and publications sent without a CONNECT.")
async def without_a_greeting(siege: Siege, _intruder: Attacker) -> str | None:
    wire = await Wire.open(siege.url)
    said = await wire.say(b"SUB > 1\r\nPUB job.submit.acme 2\r\n{}\r\n")
    await siege.stir()
    await wire.close()
    return f"was told {bytes(wire.said)!r}" if b"MSG" in wire.said or b"PONG" in said else None


@attack("A token that it signed itself: by its own key, by an account's of its own, in the name of the victim's.")
async def tokens_of_its_own(siege: Siege, intruder: Attacker) -> str | None:
    key, account, operator = Key.new("user"), Key.new("account"), Key.new("operator")
    seed = re.search(r"(SU[A-Z2-7]{56})", intruder.creds)
    assert seed is not None
    own = Key.of_seed(seed[1])
    victims, mine = siege.keys[VICTIM].record.account, siege.keys[INTRUDER].record.account
    made = [_user(account, key), _user(operator, key), _user(own, key), _user(key, key)]
    made += [_user(signer, key, issuer_account=one) for signer in (account, own) for one in (victims, mine)]
    made += [_user(own, own, issuer_account=mine), _user(account, own, issuer_account=victims)]
    return await _let_in(siege, *made)


@attack("Its own token edited: more rights, another issuer, another account, no algorithm; the signature left as it was.")
async def its_token_edited(siege: Siege, intruder: Attacker) -> str | None:
    header, body, signature = _token(intruder.creds).split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    seed = re.search(r"(SU[A-Z2-7]{56})", intruder.creds)
    assert seed is not None
    key, record = Key.of_seed(seed[1]), siege.keys[VICTIM].record
    edits = (
        {"nats": ANYTHING | {"version": 2}},
        {"iss": record.account},
        {"sub": key.public, "iss": record.account, "name": VICTIM},
        {"nats": claims["nats"] | {"issuer_account": record.account}},
        {"exp": unix_now() + 10**9},
    )
    made = []
    for edit in edits:
        changed = _edited(_token(intruder.creds), **edit).split(".")[1]
        none = base64.urlsafe_b64encode(b'{"typ":"JWT","alg":"none"}').rstrip(b"=").decode()
        made += [f"{header}.{changed}.{signature}", f"{none}.{changed}.", f"{header}.{changed}."]
    return await _let_in(siege, *(creds_text(token, key) for token in made))


@attack("The victim's token, which is no secret: without a signature, with one by another key, with one of another time.")
async def the_victims_token(siege: Siege, intruder: Attacker) -> str | None:
    token = _token(siege.keys[VICTIM].creds)
    old = await Wire.open(siege.url)
    stale = re.search(r"(SU[A-Z2-7]{56})", siege.keys[VICTIM].creds)
    assert stale is not None
    captured = base64.urlsafe_b64encode(Key.of_seed(stale[1]).sign(old.info["nonce"].encode())).rstrip(b"=").decode()
    await old.close()
    for fields in ({"sig": None}, {"sig": ""}, {}, {"sig": captured}, {"sig": "A" * 86}, {"user": VICTIM}, {"nkey": VICTIM}):
        if evidence := await _let_in(siege, intruder.creds, jwt=token, **fields):
            return evidence
    return None


@attack("A token of the victim's that has expired, and one that is not valid yet.")
async def tokens_of_another_time(siege: Siege, _intruder: Attacker) -> str | None:
    key, authority = Key.new("user"), siege.tenants.authority
    record = siege.keys[VICTIM].record
    old = authority.tenant_creds(record, key, issued=unix_now() - 100, expires=unix_now() - 10)
    early = mint(authority.tenant(VICTIM), key.public, VICTIM, ANYTHING, issued=unix_now() + 3600)
    head, body, _ = early.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))) | {"nbf": unix_now() + 3600}
    unsigned = f"{head}.{base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b'=').decode()}"
    sig = base64.urlsafe_b64encode(authority.tenant(VICTIM).sign(unsigned.encode())).rstrip(b"=").decode()
    return await _let_in(siege, old, creds_text(f"{unsigned}.{sig}", key))


@attack("A key of its own that was made void, on a connection that it holds and on new ones.")
async def a_key_made_void(siege: Siege, _intruder: Attacker) -> str | None:
    issued = await siege.tenants.rotate(INTRUDER, label="spare", keep=True)
    wire = await Wire.open(siege.url)
    assert await wire.login(issued.creds)
    await siege.tenants.revoke(INTRUDER, "spare")
    await wire.until(lambda: wire.ended)
    await wire.close()
    evidence = await _let_in(siege, issued.creds)
    await siege.rebase()
    return evidence


@attack("Another account by the fields of its CONNECT.")
async def another_account_by_name(siege: Siege, intruder: Attacker) -> str | None:
    accounts = (VICTIM, siege.keys[VICTIM].record.account, "$SYS", "provider", siege.tenants.authority.provider.public)
    for account in accounts:
        wire = await intruder.wire(account=account, import_account=account, tenant=VICTIM, name=VICTIM, echo=True)
        await wire.say(b"SUB event.> 1\r\nSUB tenant.> 2\r\n")
        await siege.stir()
        with contextlib.suppress(TimeoutError):
            await wire.say(b"")
        await wire.close()
    return None


@attack("A new token for its own account, self-signed: no limits, and everything of the provider's imported.")
async def its_account_declared(siege: Siege, intruder: Attacker) -> str | None:
    own, other = siege.keys[INTRUDER].record.account, Key.new("account")
    imports = [{"name": "all", "account": siege.tenants.authority.provider.public, "subject": ">", "type": "stream"}]
    claims = {
        "type": "account",
        "limits": LIMITS,
        "imports": imports,
        "exports": [],
        "default_permissions": {"pub": {}, "sub": {}},
    }
    tokens = [mint(signer, own, INTRUDER, claims, issued=unix_now() + 10) for signer in (other, Key.new("operator"))]
    operator = siege.tenants.authority.operator.public  # as if the operator had signed
    tokens.append(_edited(tokens[0], iss=operator))
    for token in tokens:
        for on in ("$SYS.REQ.CLAIMS.UPDATE", f"$SYS.REQ.ACCOUNT.{own}.CLAIMS.UPDATE", f"$SYS.ACCOUNT.{own}.CLAIMS.UPDATE"):
            if evidence := await intruder.any_of(on, payload=token.encode()):
                return evidence
    return None


@attack("The victim's account deleted, looked up, and all accounts listed.")
async def accounts_of_others(siege: Siege, intruder: Attacker) -> str | None:
    account = siege.keys[VICTIM].record.account
    order = mint(Key.new("operator"), account, "deletion", {"type": "generic", "accounts": [account]}, issued=unix_now())
    return await intruder.any_of("$SYS.REQ.CLAIMS.DELETE", payload=order.encode()) or await intruder.any_of(
        "$SYS.REQ.CLAIMS.LIST",
        "$SYS.REQ.CLAIMS.PACK",
        *(f"$SYS.REQ.ACCOUNT.{account}.{what}" for what in ("CLAIMS.LOOKUP", "INFO", "CONNZ", "SUBSZ", "JSZ")),
    )


@attack("The server itself: who is connected, what is subscribed, its settings; and orders to reload and to cut others off.")
async def the_server_itself(_siege: Siege, intruder: Attacker) -> str | None:
    server = (await intruder.wire()).info["server_id"]
    whats = ("STATSZ", "VARZ", "CONNZ", "SUBSZ", "ROUTEZ", "ACCOUNTZ", "JSZ", "HEALTHZ", "EXPVARZ", "PROFILEZ", "RAFTZ", "IDZ")
    pings = [f"$SYS.REQ.SERVER.PING.{what}" for what in whats]
    orders = [f"$SYS.REQ.SERVER.{server}.{what}" for what in ("RELOAD", "KICK", "LDM", "VARZ")]
    return await intruder.any_of("$SYS.REQ.SERVER.PING", "$SYS.REQ.USER.INFO", "$SYS.REQ.ACCOUNT.PING.CONNZ", *pings, *orders)


@attack("The door as a server of a cluster, a gateway, a leaf, a browser or a sensor would knock.")
async def doors_meant_for_servers(siege: Siege, intruder: Attacker) -> str | None:
    route = json.dumps(
        {"server_id": "N" * 56, "version": "2.15.1", "host": "127.0.0.1", "port": 4222, "headers": True, "jetstream": True}
    )
    token = _token(intruder.creds)
    for words in (
        f"INFO {route}\r\nCONNECT {route}\r\nRS+ {VICTIM} event.>\r\nPING\r\n",
        f'INFO {route}\r\nCONNECT {{"gateway": "x"}}\r\nA+ {VICTIM}\r\n',
        f'CONNECT {{"jwt": "{token}", "is_leaf": true, "remote_account": "{VICTIM}"}}\r\nLS+ event.>\r\nPING\r\n',
        f"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {'a' * 22}==\r\n\r\n",
        "GET /varz HTTP/1.0\r\n\r\n",
        "GET /connz?subs=1 HTTP/1.0\r\n\r\n",
        "\x10\x1c\x00\x04MQTT\x04\xc2\x00<\x00\x04acme\x00\x01a\x00\x01b",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + "a" * 64,
    ):
        wire = await Wire.open(siege.url)
        said = await wire.utter(words.encode("latin-1"))
        await wire.close()
        if said and not said.startswith(b"-ERR"):
            return f"{words[:20]!r} was answered {said!r}"
    return None


@attack("What a server speaks, on a client's connection that is let in.")
async def words_of_servers(siege: Siege, intruder: Attacker) -> str | None:
    for words in (
        f"RS+ {VICTIM} event.>\r\n",
        f"LS+ event.{VICTIM}.>\r\n",
        f"RMSG {VICTIM} event.{VICTIM}.walker 2\r\n{{}}\r\n",
        f"A+ {VICTIM}\r\n",
        f"LMSG event.{VICTIM}.walker 2\r\n{{}}\r\n",
        f"HMSG job.submit.{VICTIM} 1 12 14\r\nNATS/1.0\r\n\r\n{{}}\r\n",
        "INFO {}\r\n",
        f"MSG job.submit.{VICTIM} 1 2\r\n{{}}\r\n",
        "+OK\r\n",
        "-ERR 'x'\r\n",
        'CONNECT {"account": "acme"}\r\n',
    ):
        wire = await intruder.wire()
        said = await wire.say(words.encode())
        await wire.close()
        if said and not said.startswith((b"-ERR", b"+OK", b"INFO", b"PONG")):
            return f"{words!r} was answered {said!r}"
    await siege.served()
    return None
