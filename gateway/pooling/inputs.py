"""Turns inputs into token ids with the prompts, pairs and questions that a model was trained on. Sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import tokenizers

from blockyard.contract.pooling import PoolingKind
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from gateway.text.encoding import COUNTED_LENGTHS
from gateway.text.vocabulary import Steps, Vocabulary, encode_slices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.model_config.pooling.rule import PoolingRule
    from gateway.pooling_calls import CallOptions, Input
    from gateway.text.tokenizer import Tokenizer


class EncodedPair(NamedTuple):
    """Token ids. `second_from`: the index of the first token with token type 1; 0: none has it.

    `is_whole`: false if the text is so long that only its beginning was encoded.
    """

    token_ids: Sequence[int]
    second_from: int = 0
    is_whole: bool = True


def encode_pair(
    vocabulary: Vocabulary,
    first: str,
    second: str | None = None,
    *,
    add_special_tokens: bool = True,
    max_tokens: int | None = None,
    side: str = "right",
    enough: int | None = None,
) -> Steps[EncodedPair]:
    """Encodes one text or two, step by step; raises BlockyardError FIELD_INVALID for half a surrogate pair.

    Args:
        vocabulary: the model's vocabulary, whose backend encodes.
        first: the text, or the query.
        second: the document; None: there is only one text.
        add_special_tokens: whether the template's special tokens are added.
        max_tokens: the limit for all tokens, special tokens included; the longer of two texts is cut. None: no limit.
        side: the side on which texts are cut, "left" or "right".
        enough: the number of tokens of a text after which encoding stops, if it is not cut before.
    """
    backend = vocabulary.backend
    if max_tokens is not None:
        # Tokens beyond the limit are cut in any case, so the full length of a text makes no difference.
        enough = max_tokens if enough is None else min(max_tokens, enough)
    from_end = max_tokens is not None and side == "left"
    texts: list[tokenizers.Encoding] = []
    is_whole = True
    for text in (first, second) if second is not None else (first,):
        try:
            slices, has_all = yield from encode_slices(vocabulary, text, enough=enough, from_end=from_end)
        except TypeError:
            raise invalid([Violation("inputs", "must be Unicode text, but contains half a surrogate pair")]) from None
        texts.append(slices[0] if len(slices) == 1 else tokenizers.Encoding.merge(slices, False))
        is_whole = is_whole and (has_all or enough == max_tokens)
    if max_tokens is not None:
        num_special = backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
        rooms = _share(max(max_tokens - num_special, 0), [len(text.ids) for text in texts])
        for text, room in zip(texts, rooms, strict=True):
            text.truncate(room, direction=side)
    whole = backend.post_process(texts[0], texts[1] if second is not None else None, add_special_tokens)
    types = whole.type_ids
    return EncodedPair(tuple(whole.ids), types.index(1) if 1 in types else 0, is_whole)


def _share(room: int, lengths: list[int]) -> list[int]:
    """Divides a limit among texts. Each token to cut is taken from the longer text; of equal texts, from the second."""
    if len(lengths) == 1 or sum(lengths) <= room:
        return [min(length, room) for length in lengths]
    first, second = lengths
    shorter = min(first, second, room // 2)
    if first <= shorter:
        return [first, room - first]
    if second <= shorter:
        return [room - second, second]
    return [room - room // 2, room // 2]


DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

# Qwen3-Reranker's prompt, as its authors publish it.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)

_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class InputEncoder:
    """Encodes inputs for a model whose rule is known. Safe to call from several threads.

    `max_tokens`: the model's limit for an input. `has_token_types`: whether the model needs token types for pairs.
    """

    tokenizer: Tokenizer
    rule: PoolingRule
    max_tokens: int
    has_token_types: bool = False

    # These methods are generators that work in steps: see `gateway.text.vocabulary`.

    def encode(self, given: Input, options: CallOptions, prompt: str = "") -> Steps[EncodedPair]:
        """Encodes a single input; a text is put after `prompt`."""
        if isinstance(given, tuple):
            yield len(given)
            return EncodedPair(self._cut(given, options))
        return (yield from self._encode(prompt + given, None, options, self.limit_of(options)))

    def encode_pair(self, query: Input, document: Input, options: CallOptions, instruction: str) -> Steps[EncodedPair]:
        """Encodes a query and a document, both texts, in the form that this reranker expects."""
        assert isinstance(query, str)
        assert isinstance(document, str)
        if self.rule.kind is PoolingKind.LABEL_LOGITS:
            return (yield from self._ask(query, document, options, instruction or DEFAULT_INSTRUCTION))
        encoded = yield from self._encode(query, document, options, self.limit_of(options))
        return encoded if self.has_token_types else encoded._replace(second_from=0)

    def _encode(self, first: str, second: str | None, options: CallOptions, limit: int | None) -> Steps[EncodedPair]:
        if self.rule.lowers_case:
            first, second = first.lower(), None if second is None else second.lower()
        if second is None and limit is None:
            return (yield from self._encode_text(first, options.add_special_tokens))
        return (
            yield from encode_pair(
                self._find_vocabulary(),
                first,
                second,
                add_special_tokens=options.add_special_tokens,
                max_tokens=limit,
                side=self.tokenizer.truncation_side,
                enough=self._enough,
            )
        )

    @property
    def _enough(self) -> int:
        """The number of tokens of an input after which encoding stops."""
        return COUNTED_LENGTHS * self.max_tokens

    def _encode_text(self, text: str, add_special_tokens: bool) -> Steps[EncodedPair]:
        encoded = yield from self.tokenizer.encode_steps(text, add_special_tokens, enough=self._enough)
        return EncodedPair(encoded.token_ids, is_whole=encoded.is_whole)

    def _ask(self, query: str, document: str, options: CallOptions, instruction: str) -> Steps[EncodedPair]:
        """Encodes the question whether the document answers the query. Truncation keeps the prompt's fixed ends."""
        encode, limit = self.tokenizer.encode, self.limit_of(options)
        before, behind = encode(_BEFORE, False), encode(_BEHIND, False)
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        if limit is None:
            middle = yield from self._encode_text(text, False)
        else:
            room = max(limit - len(before) - len(behind), 0)
            middle = yield from encode_pair(self._find_vocabulary(), text, add_special_tokens=False, max_tokens=room)
        return EncodedPair((*before, *middle.token_ids, *behind), is_whole=middle.is_whole)

    def _find_vocabulary(self) -> Vocabulary:
        """Returns the vocabulary, which pairs and truncates; raises BlockyardError FEATURE_DISABLED if it cannot."""
        if not self.tokenizer.backend_encodes:
            message = "the model's tokenizer can neither pair nor cut texts, since it has no tokenizer.json"
            raise BlockyardError(Reason.FEATURE_DISABLED, message)
        return self.tokenizer.vocabulary

    def limit_of(self, options: CallOptions) -> int | None:
        """Returns the number of tokens to which an input is truncated; None: it is not truncated."""
        return self.max_tokens if options.truncate_prompt_tokens == -1 else options.truncate_prompt_tokens

    def _cut(self, token_ids: Sequence[int], options: CallOptions) -> Sequence[int]:
        limit = self.limit_of(options)
        if limit is None:
            return token_ids
        return token_ids[-limit:] if self.tokenizer.truncation_side == "left" else token_ids[:limit]

    def find_labels(self) -> tuple[int, ...]:
        """Finds the tokens whose logits make the score; raises BlockyardError MODEL_NOT_LOADED if they are missing."""
        if self.rule.kind is not PoolingKind.LABEL_LOGITS or self.rule.label_token_ids:
            return self.rule.label_token_ids
        found = [self.tokenizer.backend.token_to_id(text) for text in self.rule.labels]
        if None in found:
            texts = " and ".join(map(repr, self.rule.labels))
            raise BlockyardError(
                Reason.MODEL_NOT_LOADED, f"the tokenizer lacks the tokens {texts}, which make the score"
            )
        return tuple(number for number in found if number is not None)
