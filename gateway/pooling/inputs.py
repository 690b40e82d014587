"""Turns inputs into the token ids that a model was trained on: its prompts, its pairs, its questions. Sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.pooling.rule import PoolingKind
from gateway.text.pairs import EncodedPair, encode_pair

if TYPE_CHECKING:
    import tokenizers

    from blockyard.model_config.pooling.rule import PoolingRule
    from gateway.pooling_calls import CallOptions, Input
    from gateway.text.tokenizer import Tokenizer

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Qwen3-Reranker's, as its authors publish it.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class InputEncoder:
    """Encodes inputs for a model whose rule is known. Safe to call from several threads.

    `max_tokens`: of an input, as the model has it. `has_token_types`: it is told where the second of two texts begins.
    """

    tokenizer: Tokenizer
    rule: PoolingRule
    max_tokens: int
    has_token_types: bool = False

    def encode(self, given: Input, options: CallOptions, prompt: str = "") -> EncodedPair:
        """Encodes an input by itself, a text behind a prompt."""
        if isinstance(given, tuple):
            return EncodedPair(self._cut(given, options))
        return self._encode(prompt + given, None, options, self._limit(options))

    def encode_pair(self, query: Input, document: Input, options: CallOptions, instruction: str) -> EncodedPair:
        """Encodes a query and a document, both texts, as this reranker takes them."""
        assert isinstance(query, str)
        assert isinstance(document, str)
        if self.rule.kind is PoolingKind.LABEL_LOGITS:
            return self._ask(query, document, options, instruction or DEFAULT_INSTRUCTION)
        encoded = self._encode(query, document, options, self._limit(options))
        return encoded if self.has_token_types else EncodedPair(encoded.token_ids)

    def _encode(self, first: str, second: str | None, options: CallOptions, limit: int | None) -> EncodedPair:
        if self.rule.lowers_case:
            first, second = first.lower(), None if second is None else second.lower()
        if second is None and limit is None:
            return EncodedPair(tuple(self.tokenizer.encode(first, options.add_special_tokens)))
        return encode_pair(
            self._find_backend(),
            first,
            second,
            add_special_tokens=options.add_special_tokens,
            max_tokens=limit,
            side=self.tokenizer.truncation_side,
        )

    def _ask(self, query: str, document: str, options: CallOptions, instruction: str) -> EncodedPair:
        """Asks whether the document answers. The question keeps its beginning and its end where it is cut."""
        encode, limit = self.tokenizer.encode, self._limit(options)
        before, behind = encode(_BEFORE, False), encode(_BEHIND, False)
        room = None if limit is None else max(limit - len(before) - len(behind), 0)
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        if room is None:
            return EncodedPair((*before, *encode(text, False), *behind))
        middle = encode_pair(self._find_backend(), text, add_special_tokens=False, max_tokens=room)
        return EncodedPair((*before, *middle.token_ids, *behind))

    def _find_backend(self) -> tokenizers.Tokenizer:
        """Returns what knows pairs and cuts texts; raises BlockyardError FEATURE_DISABLED where nothing does."""
        if not self.tokenizer.backend_encodes:
            message = "the model's tokenizer, which has no tokenizer.json, makes no pairs of texts and cuts none"
            raise BlockyardError(Reason.FEATURE_DISABLED, message)
        return self.tokenizer.backend

    def _limit(self, options: CallOptions) -> int | None:
        return self.max_tokens if options.truncate_prompt_tokens == -1 else options.truncate_prompt_tokens

    def _cut(self, token_ids: tuple[int, ...], options: CallOptions) -> tuple[int, ...]:
        limit = self._limit(options)
        if limit is None:
            return token_ids
        return token_ids[-limit:] if self.tokenizer.truncation_side == "left" else token_ids[:limit]

    def find_labels(self) -> tuple[int, ...]:
        """Finds the tokens whose logits are a score; raises BlockyardError MODEL_NOT_LOADED."""
        if self.rule.kind is not PoolingKind.LABEL_LOGITS or self.rule.label_token_ids:
            return self.rule.label_token_ids
        found = [self.tokenizer.backend.token_to_id(text) for text in self.rule.labels]
        if None in found:
            texts = " and ".join(map(repr, self.rule.labels))
            raise BlockyardError(Reason.MODEL_NOT_LOADED, f"the tokenizer has no tokens {texts}, which make the score")
        return tuple(number for number in found if number is not None)
