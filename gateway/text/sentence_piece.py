"""Turns text into ids with SentencePiece, and recognizes special tokens in the text.

A text is first split at added tokens and at pieces that the model never makes from text; SentencePiece encodes the
texts between them. Ids are decoded with Llama 2's decoder in `tokenizers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2 as messages
from tokenizers import AddedToken, decoders, models

from gateway.text.text_bounds import bounds_of_sentence_piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# The types of pieces that the model never makes from text: only explicit special tokens become them.
_UNKNOWN, _CONTROL = 2, 3


class SentencePiece:
    """A `tokenizer.model`.

    Attributes:
        backend: a tokenizer with the pieces, the special tokens and the decoder; it does not encode.
        bounds: lower bounds for the number of a text's tokens.
    """

    def __init__(
        self,
        content: bytes,
        added: Mapping[int, AddedToken],
        *,
        specials: Mapping[str, str],
        adds_begin: bool,
        adds_end: bool,
        prefixes_each: bool,
        prefixes_first: bool,
    ) -> None:
        """Parses a `tokenizer.model`; an invalid file raises errors of any kind.

        Args:
            content: the content of the file.
            added: added tokens by their ids; they replace the pieces with these ids.
            specials: the texts of special tokens by their names (`bos_token`, …).
            adds_begin: whether adding special tokens puts a begin token before the text.
            adds_end: whether adding special tokens puts an end token after the text.
            prefixes_each: whether a text after a special token gets a word prefix, like the beginning of the text.
            prefixes_first: whether the beginning of a text gets a word prefix, if the model adds one.
        """
        model: Any = messages.ModelProto.FromString(content)  # pyright: ignore[reportAttributeAccessIssue] - made as it is imported
        texts = {token_id: str(piece.piece) for token_id, piece in enumerate(model.pieces)}
        named = {
            token_id: AddedToken(texts[token_id], special=True, normalized=False)
            for token_id, piece in enumerate(model.pieces)
            if piece.type in (_UNKNOWN, _CONTROL) or piece.piece in specials.values()
        }
        named |= added
        texts |= {token_id: str(token.content) for token_id, token in named.items()}
        has_prefix = bool(model.normalizer_spec.add_dummy_prefix) and prefixes_first
        self.backend = _make_backend(texts, named, strips_prefix=has_prefix)
        self.bounds = bounds_of_sentence_piece(model, named)
        self._named_ids = {str(token.content): token_id for token_id, token in named.items()}
        self._cutter = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._cutter.add_tokens(list(named.values()))
        self._first = _load(model, has_prefix)
        self._later = _load(model, has_prefix and prefixes_each)
        begin = self._named_ids.get(specials.get("bos_token", ""), self._first.bos_id())
        end = self._named_ids.get(specials.get("eos_token", ""), self._first.eos_id())
        self._begin = [begin] if adds_begin and begin >= 0 else []
        self._end = [end] if adds_end and end >= 0 else []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Turns a text into ids; raises TypeError for half a surrogate pair."""
        ids = [token_id for part in self._parts(text) for token_id in part]
        return [*self._begin, *ids, *self._end] if add_special_tokens else ids

    def _parts(self, text: str) -> Iterator[list[int]]:
        # Unlike `encode`, a batch releases the interpreter's lock.
        cut: Any = self._cutter.encode_batch([text], add_special_tokens=False)[0]
        for number, token, (start, stop) in zip(cut.ids, cut.tokens, cut.offsets, strict=True):
            if number:
                yield [self._named_ids[token]]
            else:
                pieces = self._later if start else self._first
                yield cast("list[int]", pieces.encode(text[start:stop]))


def _load(model: Any, has_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    model.normalizer_spec.add_dummy_prefix = has_prefix
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def _make_backend(
    texts: Mapping[int, str], named: Mapping[int, AddedToken], *, strips_prefix: bool
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={text: number for number, text in texts.items()}, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_prefix else steps)
    backend.add_tokens(list(named.values()))
    return backend
