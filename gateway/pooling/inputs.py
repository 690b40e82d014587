"""Turns inputs into token ids with the prompts, pairs and questions that a model was trained on. Sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.contract.pooling import PoolingKind
from blockyard.errors import BlockyardError, Reason
from gateway.text.encoding import COUNTED_LENGTHS
from gateway.text.pairs import EncodedPair, encode_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.model_config.pooling.rule import PoolingRule
    from gateway.pooling_calls import CallOptions, Input
    from gateway.text.tokenizer import Tokenizer
    from gateway.text.vocabulary import Steps, Vocabulary

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
