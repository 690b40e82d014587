"""The salts that part prefixes: whose are equal."""

from __future__ import annotations

import hashlib

from gateway.request import derive_cache_salt


def test_a_salt_stays_what_it_is() -> None:
    """Another gateway, and another version, has to derive the same, or their requests share nothing."""
    assert derive_cache_salt("acme", "x") == hashlib.sha256(b"acme/x").digest()
    assert derive_cache_salt("", "") == b""


def test_no_two_pairs_of_tenant_and_salt_have_one_salt() -> None:
    pairs = [("", ""), ("acme", ""), ("", "acme"), ("", "acme/"), ("acme", "x"), ("", "acme/x"), ("acme", "/x")]
    assert len({derive_cache_salt(*pair) for pair in pairs}) == len(pairs)
