"""Turns text into ids by SentencePiece, with special tokens where they stand in the text.

A text is cut at the tokens that are no piece of the model, or are one that it never makes of a text; SentencePiece
encodes what lies between them. Ids become text by the decoder of Llama 2 in `tokenizers`.
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
        backend: has the pieces, the special tokens and how ids become text; it does not encode.
        bounds: the least number of tokens that a text can have.
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
        """Reads one.

        Args:
            content: of the file; raises an error of any kind where it is none.
            added: tokens by their ids, which go before the pieces that have these ids.
            specials: texts of special tokens by their names (`bos_token`, …).
            adds_begin: a begin token stands before a text that special tokens are added to.
            adds_end: an end token stands behind it.
            prefixes_each: what follows a special token begins a word, as the beginning of the text does.
            prefixes_first: the beginning of a text begins a word, if the model has it so.
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
        # A batch of one lets other threads run meanwhile.
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
