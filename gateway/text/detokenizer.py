"""Turns ids into text incrementally, in complete characters. The pieces joined are the decoding of all ids.

There are two ways, depending on the tokenizer's decoder. In byte-level vocabularies each id has its bytes, so that the
text is the UTF-8 decoding of the joined bytes: exact and cheap. For any other decoder, the ids before the new ones are
decoded with and without the new ones, and the text is the difference. A run of byte-fallback ids waits until it ends,
because one bad byte turns the whole run into U+FFFD. `tokenizers.decoders.DecodeStream` would release such runs too
early, and raise an error when they change.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any, Protocol

from blockyard.contract.events import TokenLogprobs
from blockyard.panics import panics_as_errors
from gateway.request import ReturnedLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    import tokenizers

    from blockyard.contract.sampling import Candidates


class TokenTexts:
    """Adds the tokens' texts to log probabilities. Caches the text of each token."""

    def __init__(self, detokenizers: DetokenizerFactory, *, skip_special_tokens: bool) -> None:
        self._detokenizers = detokenizers
        self._skip_special_tokens = skip_special_tokens
        self._texts: dict[int, tuple[str, bytes]] = {}

    def of(self, token_id: int) -> tuple[str, bytes]:
        """Returns a token's own text, and the bytes that it adds to the answer's text; see ReturnedLogprob."""
        texts = self._texts.get(token_id)
        if texts is None:
            text = self._detokenizers.bytes_of(token_id, skip_special_tokens=False).decode(errors="replace")
            raw = self._detokenizers.bytes_of(token_id, skip_special_tokens=self._skip_special_tokens)
            texts = self._texts[token_id] = (text, raw)
        return texts

    def logprobs_of(self, candidates: Candidates) -> TokenLogprobs:
        """Returns the log probabilities at one position: of the chosen token and of the likeliest tokens."""
        token_ids, logprobs, ranks = candidates
        chosen, *top = (
            ReturnedLogprob(token_id, text, logprob, rank, raw)
            for token_id, logprob, rank, (text, raw) in zip(
                token_ids, logprobs, ranks, map(self.of, token_ids), strict=True
            )
        )
        return TokenLogprobs(chosen, tuple(top))


# The number of earlier ids that are decoded together with new ones: a decoder depends at most on neighbouring ids.
_NUM_CONTEXT_TOKENS = 4

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Adds ids and returns the text that is now final."""
        ...

    def flush(self) -> str:
        """Returns the remaining text at the end of the sequence; incomplete characters become U+FFFD."""
        ...


class DetokenizerFactory:
    """Makes the detokenizers of one tokenizer.

    Args:
        backend: the tokenizer.
        markers: the dialect's markers, of which special tokens may be parts.
    """

    def __init__(self, backend: tokenizers.Tokenizer, markers: Sequence[str] = ()) -> None:
        self._backend = backend
        description = json.loads(backend.to_str())
        decoders = _flatten(description.get("decoder"))
        kinds = [decoder["type"] for decoder in decoders]
        specials = {token["id"]: token["content"] for token in description["added_tokens"] if token["special"]}
        special = specials.keys()
        unmarked = {token_id for token_id, text in specials.items() if not any(text in marker for marker in markers)}
        pieces = {token_id: piece for piece, token_id in backend.get_vocab(with_added_tokens=True).items()}
        # The ids that have text, by `skip_special_tokens`; None: skip all special tokens except the dialect's markers.
        self._kept_ids = {
            False: frozenset(pieces),
            True: frozenset(pieces) - special,
            None: frozenset(pieces) - unmarked,
        }
        # After one of these ids, a sequence continues a text; after any other id, a new text begins.
        self._text_ids = self._kept_ids[True]
        self._holds_incomplete = "ByteLevel" in kinds
        self._byte_ids: dict[int, bytes] = {}
        self._tables: dict[bool | None, list[bytes]] = {}
        if kinds == ["ByteLevel"]:
            whole = _byte_table(pieces, frozenset())
            self._tables = {
                False: whole,
                True: _byte_table(pieces, special),
                None: _byte_table(pieces, unmarked) if markers else [],
            }
        elif "ByteFallback" in kinds:
            found = ((token_id, _BYTE_PIECE.fullmatch(piece)) for token_id, piece in pieces.items())
            self._byte_ids = {token_id: bytes.fromhex(match[1]) for token_id, match in found if match}
            self._text_ids -= self._byte_ids.keys()
        texts = ((token_id, backend.decode([token_id])) for token_id in sorted(self._text_ids))
        # An ordinary token, before which other tokens are decoded as in the middle of a text.
        self._neighbour = [next((token_id for token_id, text in texts if text.strip()), 0)]

    def make(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True, keeps_markers: bool = False
    ) -> Detokenizer:
        """Makes the detokenizer of a sequence that continues a prompt.

        Some decoders drop the space before the first word of a text; a sequence that continues a text keeps it.

        `keeps_markers`: whether the text keeps special tokens that are the dialect's markers.
        """
        skips = None if skip_special_tokens and keeps_markers else skip_special_tokens
        if self._tables:
            return ByteDetokenizer(self._tables[skips])
        last = prompt_token_ids[-1:]
        return WindowDetokenizer(
            self._backend,
            self._kept_ids[skips],
            byte_ids=self._byte_ids.keys(),
            holds_incomplete=self._holds_incomplete,
            context=last if self._text_ids.issuperset(last) else (),
        )

    def bytes_of(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """Returns the UTF-8 bytes that a token adds to a text; they may be an incomplete character."""
        if self._tables:
            return b"".join(self._tables[skip_special_tokens][token_id : token_id + 1])
        if token_id in self._byte_ids:
            return self._byte_ids[token_id]
        detokenizer = self.make(self._neighbour, skip_special_tokens=skip_special_tokens)
        return (detokenizer.push([token_id]) + detokenizer.flush()).encode()


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [inner for item in decoder["decoders"] for inner in _flatten(item)]
    return [decoder]


def byte_of_character() -> dict[str, int]:
    """Returns the byte of each character of a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return table


def _byte_table(pieces: dict[int, str], skipped_ids: Set[int]) -> list[bytes]:
    """Returns the bytes of each id; empty for ids without a piece and for ids to skip."""
    byte_of = byte_of_character()
    table = [b""] * (max(pieces, default=-1) + 1)
    for token_id, piece in pieces.items():
        if token_id in skipped_ids:
            continue
        try:
            table[token_id] = bytes([byte_of[character] for character in piece])
        except KeyError:
            # An added token that is not a byte-level piece stands for its own text.
            table[token_id] = piece.encode()
    return table


class ByteDetokenizer:
    """Decodes ids of byte-level vocabularies."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        table, size = self._table, len(self._table)
        return self._decoder.decode(b"".join([table[i] for i in token_ids if i < size]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes ids with any decoder, by decoding a window of the last ids with and without the new ones."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        kept_ids: frozenset[int],
        *,
        byte_ids: Set[int],
        holds_incomplete: bool,
        context: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self._kept_ids = kept_ids
        self._byte_ids = byte_ids
        self._holds_incomplete = holds_incomplete
        self._window = list(context)
        self._num_read = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        self._window.extend(i for i in token_ids if i in self._kept_ids)
        end = len(self._window)
        while end > self._num_read and self._window[end - 1] in self._byte_ids:
            end -= 1
        return self._read_to(end)

    def flush(self) -> str:
        self._holds_incomplete = False
        return self._read_to(len(self._window))

    def _read_to(self, end: int) -> str:
        if end == self._num_read:
            return ""
        before = self._decode(self._window[: self._num_read])
        text = self._decode(self._window[:end])[len(before) :]
        if self._holds_incomplete and text.endswith("\ufffd"):
            return ""
        start = max(0, end - _NUM_CONTEXT_TOKENS)
        del self._window[:start]
        self._num_read = end - start
        return text

    @panics_as_errors()
    def _decode(self, token_ids: list[int]) -> str:
        # Special tokens that are skipped have been removed already.
        return self._backend.decode(token_ids, skip_special_tokens=False)
