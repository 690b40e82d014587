"""Reports when a process's certificates expire: in its metrics, and in its log well before.

Reads only the two times of a certificate, without a library for certificates, which every service would depend on.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from blockyard.security.tls import CertificateFiles

log = EventLogger(__name__)

DAY_SECONDS = 86400.0
# Automatic renewal comes well before a fifth of a certificate's lifetime is left.
WARN_SHARE, WARN_DAYS = 0.2, 14
CHECK_SECONDS = 3600.0
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# DER tags.
_VERSION, _SHORT_TIME = 0xA0, 0x17


class Validity(NamedTuple):
    """The validity period of a certificate, in seconds since 1970."""

    begin: float
    end: float

    @property
    def warn_at(self) -> float:
        """The time from which operators are warned, in seconds since 1970."""
        return self.end - min(WARN_SHARE * (self.end - self.begin), WARN_DAYS * DAY_SECONDS)


def read_validity(chain: bytes) -> Validity:
    """Returns the validity of the certificate in a PEM chain that ends first; raises ValueError if there is none."""
    certificates = [ssl.PEM_cert_to_DER_cert(text.decode("ascii")) for text in _PEM.findall(chain)]
    if not certificates:
        raise ValueError("no certificate")
    return min(map(_validity_of, certificates), key=lambda validity: validity.end)


def _validity_of(certificate: bytes) -> Validity:
    """Reads the two times, which follow serial number, algorithm and issuer (RFC 5280, 4.1)."""
    _, begin, _ = _element(certificate, 0)
    _, at, _ = _element(certificate, begin)
    tag, _, behind = _element(certificate, at)
    at = behind if tag == _VERSION else at
    for _ in range(3):
        *_, at = _element(certificate, at)
    _, at, _ = _element(certificate, at)
    first, begin_at, behind = _element(certificate, at)
    second, end_at, end_behind = _element(certificate, behind)
    return Validity(_time(first, certificate[begin_at:behind]), _time(second, certificate[end_at:end_behind]))


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Returns an element's tag, the offset of its content, and the offset after it."""
    length, begin = der[at + 1], at + 2
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(der[at + 2 : begin], "big")
    return der[at], begin, begin + length


def _time(tag: int, text: bytes) -> float:
    form = "%y%m%d%H%M%SZ" if tag == _SHORT_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC).timestamp()


class CertificateWatch:
    """Checks certificates every hour; warns once a day of each that ends soon or has ended.

    Args:
        files: certificate files by purpose; None values are skipped.
        clock: returns seconds since 1970.
    """

    def __init__(self, files: Mapping[str, CertificateFiles | None], clock: Callable[[], float] = time.time) -> None:
        self._files = {name: each for name, each in files.items() if each is not None}
        self._clock = clock
        self._warned_at: dict[str, float] = {}

    def start(self) -> None:
        if self._files:
            self._tick(asyncio.get_running_loop())

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        # Schedule the next check first, so that a failing check is not the last one.
        loop.call_later(CHECK_SECONDS, self._tick, loop)
        self.check()

    def expiries(self) -> dict[tuple[str, ...], float]:
        """Returns the end of each certificate, in seconds since 1970. May be called from any thread."""
        return {(name,): validity.end for name, each in self._files.items() if (validity := _known_validity(each))}

    def check(self) -> None:
        """Logs a warning for each certificate that ends soon or has ended."""
        now = self._clock()
        for name, files in self._files.items():
            validity = _known_validity(files)
            was_warned = now - self._warned_at.get(name, float("-inf")) < DAY_SECONDS
            if validity is None or now < validity.warn_at or was_warned:
                continue
            self._warned_at[name] = now
            left = validity.end - now
            log.warning(
                "a certificate ends soon" if left > 0 else "a certificate has ended",
                certificate=name,
                file=files.chain_path,
                end=datetime.fromtimestamp(validity.end, UTC).isoformat(),
                days_left=round(left / DAY_SECONDS, 1),
            )


def _known_validity(files: CertificateFiles) -> Validity | None:
    """Returns the validity; None if its times cannot be read: an unusual form must not end a service."""
    try:
        return read_validity(files.current().chain)
    except (ValueError, IndexError):
        return None
