"""TLS of the embedded server: certificates of its own where none are given, and what a client needs to check them.

Off the loopback interface TLS is on. A certificate of an authority that everybody knows is given by NEXUS_TLS_CERT and
NEXUS_TLS_KEY; without, the server makes an authority of its own, whose `ca.pem` goes to clients together with their `.creds`.
"""

import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from nexus_bus.errors import Denied, Refused

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.hashes import SHA256

CA_FILE = "ca.pem"
YEARS = 10  # of an authority of our own
RENEW_DAYS, LIFE_DAYS = 30, 397  # of a server's certificate; a browser takes no longer life than that


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and with which certificate; None: in the clear, on the loopback interface only."""

    address: str = "127.0.0.1"
    cert: Path | None = None
    key: Path | None = None
    names: tuple[str, ...] = ()  # further ones it is reached by; of a certificate that is given, the first is what it says
    tls: bool | None = None  # None: off the loopback interface

    @classmethod
    def from_environment(cls) -> "Listening":
        """NEXUS_LISTEN, NEXUS_TLS_CERT, NEXUS_TLS_KEY, NEXUS_TLS_NAMES (commas), NEXUS_TLS (on, off).

        Raises:
            Refused: half a certificate, or a value that is none.
        """
        given = {key: os.environ.get(f"NEXUS_{key}", "") for key in ("LISTEN", "TLS_CERT", "TLS_KEY", "TLS_NAMES", "TLS")}
        if bool(given["TLS_CERT"]) != bool(given["TLS_KEY"]):
            raise Refused("NEXUS_TLS_CERT and NEXUS_TLS_KEY: give both, or neither")
        if given["TLS"] not in ("", "on", "off"):
            raise Refused(f"NEXUS_TLS: {given['TLS']!r}; give on or off")
        return cls(
            address=given["LISTEN"] or "127.0.0.1",
            cert=Path(given["TLS_CERT"]) if given["TLS_CERT"] else None,
            key=Path(given["TLS_KEY"]) if given["TLS_KEY"] else None,
            names=tuple(filter(None, given["TLS_NAMES"].split(","))),
            tls={"": None, "on": True, "off": False}[given["TLS"]],
        )

    @property
    def secure(self) -> bool:
        """Whether it speaks TLS."""
        return self.tls if self.tls is not None else self.cert is not None or not _loopback(self.address)

    @property
    def local(self) -> str:
        """The address by which programs of this machine reach it."""
        return "127.0.0.1" if self.address in ("0.0.0.0", "::") else self.address  # noqa: S104 - compared, not bound

    @property
    def host(self) -> str:
        """The name to check its certificate by."""
        return self.names[0] if self.cert is not None and self.names else self.local

    def files(self, directory: Path) -> tuple[Path, Path]:
        """(certificate, key), made in a directory if none were given.

        Raises:
            Refused: a file that was given cannot be read.
        """
        if self.cert is not None and self.key is not None:
            for path in (self.cert, self.key):
                if not os.access(path, os.R_OK):
                    raise Refused(f"TLS: {path} cannot be read")
            return self.cert.resolve(), self.key.resolve()
        return _made(directory, self)


def context(ca: str | Path | None) -> ssl.SSLContext:
    """What a client checks a server with: an authority's certificate, or those this machine trusts.

    Raises:
        Denied: the file is missing or is no certificate.
    """
    try:
        return ssl.create_default_context(cafile=str(ca) if ca else None)
    except (OSError, ssl.SSLError) as error:
        raise Denied(f"NEXUS_CA: {ca}: {error}; it names the ca.pem that came with the credentials") from None


def _loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _made(directory: Path, where: Listening) -> tuple[Path, Path]:
    """A certificate of an authority of our own; a new one when it is about to end, or when it lacks a name."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

    names = sorted({"localhost", "127.0.0.1", where.local, socket.gethostname(), *where.names})
    cert, key = directory / "server.pem", directory / "server.key"
    if cert.is_file() and key.is_file():
        known = x509.load_pem_x509_certificate(cert.read_bytes())
        said = known.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        has = {str(one) for kind in (x509.DNSName, x509.IPAddress) for one in said.get_values_for_type(kind)}
        if known.not_valid_after_utc - datetime.now(UTC) > timedelta(days=RENEW_DAYS) and has >= set(names):
            return cert, key
    issuer, signer = _authority(directory)
    own = generate_private_key(SECP256R1())
    built = _builder("nexus-bus server", issuer.subject, own.public_key(), timedelta(days=LIFE_DAYS))
    built = built.add_extension(x509.SubjectAlternativeName([_name(one) for one in names]), critical=False)
    built = built.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    _write(key, own, cert, built.sign(signer, _sha256()))
    return cert, key


def _authority(directory: Path) -> tuple["x509.Certificate", "EllipticCurvePrivateKey"]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    cert, key = directory / CA_FILE, directory / "ca.key"
    if not (cert.is_file() and key.is_file()):
        made = generate_private_key(SECP256R1())
        name = _subject("nexus-bus authority")
        built = _builder("nexus-bus authority", name, made.public_key(), timedelta(days=365 * YEARS))
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        _write(key, made, cert, built.sign(made, _sha256()))
    signer = load_pem_private_key(key.read_bytes(), None)
    if not isinstance(signer, EllipticCurvePrivateKey):
        raise Refused(f"TLS: {key} holds no key that this program made")
    return x509.load_pem_x509_certificate(cert.read_bytes()), signer


def _builder(name: str, issuer: "x509.Name", public: "EllipticCurvePublicKey", life: timedelta) -> "x509.CertificateBuilder":
    from cryptography import x509

    begin = datetime.now(UTC) - timedelta(hours=2)  # clocks differ
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + life)
    )


def _subject(name: str) -> "x509.Name":
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _name(text: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write(key: Path, secret: "EllipticCurvePrivateKey", cert: Path, built: "x509.Certificate") -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    text = secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
    cert.write_bytes(built.public_bytes(Encoding.PEM))


def _sha256() -> "SHA256":
    from cryptography.hazmat.primitives.hashes import SHA256

    return SHA256()
