"""An authority of a test: signs certificates with chosen names and times, and signs them anew under the same file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from blockyard.client.access import ClientTls

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VALID = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, PEM files."""

    certificate: Path
    key: Path

    def settings(self, prefix: str) -> dict[str, str]:
        """Gives them as settings: `tls_certificate`, `tls_key` for `tls`."""
        return {f"{prefix}_certificate": str(self.certificate), f"{prefix}_key": str(self.key)}

    def flags(self, prefix: str) -> list[str]:
        """Gives them as flags."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.settings(prefix).items()]


# Python 3.13 and later refuse an authority that does not say what its key is for.
_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _write(path: Path, content: bytes) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    os.replace(beside, path)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    form = serialization.PrivateFormat.PKCS8
    _write(path, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


class Authority:
    """Signs. `certificate` is its own, a PEM file."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = folder / f"{name}.pem"
        built = self._builder(self._name, self._key.public_key(), VALID).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        built = built.add_extension(_SIGNS, critical=True)
        _write(self.certificate, self._sign(built))

    def _builder(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey, valid: timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + valid)
            # Python 3.13 and later refuse a certificate that does not name its authority's key.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )

    def _sign(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        stem: str,
        *,
        common_name: str = "",
        names: Sequence[str] = ("localhost",),
        valid: timedelta = VALID,
        folder: Path | None = None,
    ) -> Pair:
        """Signs a certificate, for 127.0.0.1 too, into files that replace those of the same stem.

        Args:
            stem: of the files' names.
            common_name: of the subject; empty: the stem.
            names: the DNS names in it.
            valid: from now on; a negative time has passed.
            folder: instead of the authority's.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [*map(x509.DNSName, names), x509.IPAddress(IPv4Address("127.0.0.1"))]
        builder = self._builder(_name(common_name or stem), key.public_key(), valid).add_extension(
            x509.SubjectAlternativeName(alternatives), critical=False
        )
        folder = folder or self._folder
        pair = Pair(folder / f"{stem}.pem", folder / f"{stem}.key")
        _write(pair.certificate, self._sign(builder))
        _write_key(pair.key, key)
        return pair

    def client(self, pair: Pair | None = None, server_name: str = "") -> ClientTls:
        """Returns what a client trusts, and shows."""
        shown = (str(pair.certificate), str(pair.key)) if pair else ("", "")
        return ClientTls(str(self.certificate), *shown, server_name)


def trust(file: Path, *authorities: Authority) -> None:
    """Writes a file of all these authorities."""
    _write(file, b"".join(authority.certificate.read_bytes() for authority in authorities))
