"""A model's tokenizer with its chat template, end tokens and generation defaults. Knows no files and no requests."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from blockyard.contract.sampling import ThinkingTokens
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.panics import panics_as_errors
from gateway.dialects.table import AUTO, choose_dialect
from gateway.text.chat_template import ChatTemplate
from gateway.text.detokenizer import Detokenizer, DetokenizerFactory, TokenTexts
from gateway.text.fill_in_middle import FillTokens, find_fill_tokens
from gateway.text.template_roles import TemplateRoles, arrange
from gateway.text.vocabulary import Encoded, Steps, Vocabulary, encode_steps

if TYPE_CHECKING:
    from collections.abc import Sequence


# White space before the marker that begins reasoning at an answer's beginning.
_SPACES = ("", "\n", "\n\n", " ")
# A character of which no vocabulary has a longer piece.
_MARK = "\u263a"


class Tokenizer:
    """Turns text into ids and back, with the files of one model. Safe to call from several threads.

    Attributes:
        vocabulary: the pieces, and the functions that encode texts.
        vocab_size: the number of ids that have a piece; the model's own vocabulary may be larger.
        end_token_ids: the ids that end a sequence, from config.json, generation_config.json and the tokenizer.
        generation_defaults: values of generation_config.json for parameters that a request does not set.
        model_digest: SHA-256 of config.json, in hex.
        special_tokens: the texts of special tokens by their names in tokenizer_config.json.
        truncation_side: the side at which texts of pooling calls are cut, "left" or "right".
        dialect: the format of the model's reasoning and tool calls, found by its chat template; None: unknown.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        chat_template: ChatTemplate | None = None,
        end_token_ids: frozenset[int] = frozenset(),
        generation_defaults: dict[str, float] | None = None,
        model_digest: str = "",
        special_tokens: dict[str, str] | None = None,
        truncation_side: str = "right",
        dialect: str = AUTO,
    ) -> None:
        self.vocabulary = vocabulary
        self.backend = backend = vocabulary.backend
        self.truncation_side = truncation_side
        self._chat_template = chat_template
        self._named_dialect = dialect
        self.dialect = choose_dialect(dialect, chat_template.source if chat_template else "")
        self._detokenizers = DetokenizerFactory(backend, self.dialect.markers if self.dialect else ())
        self._token_texts = {skip: TokenTexts(self._detokenizers, skip_special_tokens=skip) for skip in (False, True)}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.end_token_ids = end_token_ids
        self.generation_defaults = generation_defaults or {}
        self.model_digest = model_digest
        self.special_tokens = special_tokens or {}

    @property
    def backend_encodes(self) -> bool:
        """Whether the backend encodes texts; if not, SentencePiece does."""
        return self.vocabulary.backend_encodes

    @cached_property
    def shows_reasoning(self) -> bool:
        """Whether the chat template writes reasoning. Only some models of a dialect reason."""
        begins = self.dialect.reasoning.begins if self.dialect and self.dialect.reasoning else ()
        template = self._chat_template.source if self._chat_template else ""
        return any(begin in template for begin in begins)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The ids of the tokens that a grammar can only allow as tokens, by their texts.

        These are special tokens, and added tokens in angle brackets: llguidance takes the latter for special, too, and
        Qwen's `<tool_call>` and `</think>` are such tokens.
        """
        added = self.backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special or _is_tag(token.content)}

    @cached_property
    def num_ids(self) -> int:
        """The largest id that has a piece, plus 1."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def fill_tokens(self) -> FillTokens | None:
        """The tokens with which the model fills in the middle of a text; None if it has none."""
        return find_fill_tokens(self.backend.token_to_id)

    @cached_property
    def begin_token_ids(self) -> tuple[int, ...]:
        """The special tokens before a text."""
        plain, whole = self.encode(_MARK, False), self.encode(_MARK)
        num_added = len(whole) - len(plain)
        return tuple(whole[: next(n for n in range(num_added + 1) if whole[n : n + len(plain)] == plain)])

    @cached_property
    def inner_mark(self) -> tuple[str, int]:
        """A text before which to encode a text that does not begin a line, and the number of the mark's tokens.

        SentencePiece adds a space to each text that it encodes: a text behind other tokens is encoded behind a mark,
        whose tokens are then dropped. Vocabularies that add no space need no mark, and have an empty one.
        """
        token_ids = self.encode(_MARK, False)
        return (_MARK, len(token_ids)) if self.piece(token_ids[0]).startswith("▁") else ("", 0)

    def encode_inner(self, text: str) -> tuple[int, ...]:
        """Turns a text that stands behind other tokens into ids."""
        mark, num_mark_tokens = self.inner_mark
        return tuple(self.encode(mark + text, False)[num_mark_tokens:])

    @cached_property
    def thinking_tokens(self) -> ThinkingTokens | None:
        """The tokens around reasoning; None if the model does not reason, or ends it with more than one token."""
        reasoning = self.dialect.reasoning if self.dialect else None
        ends = [ids for ids in map(self.encode_inner, reasoning.ends if reasoning else ()) if len(ids) == 1]
        if self.dialect is None or reasoning is None or not ends:
            return None
        anywhere = self.dialect.reasons_anywhere
        spaces = ("",) if anywhere else _SPACES
        begins = [self.encode_inner(space + begin) for begin in reasoning.begins for space in spaces]
        return ThinkingTokens(ends[0][0], tuple(dict.fromkeys(begins)), begins_anywhere=anywhere)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def template_roles(self) -> TemplateRoles | None:
        """The orders of roles that the chat template accepts; None without a template."""
        return self._chat_template.roles if self._chat_template else None

    def adapt(
        self, vocabulary: Vocabulary | None, chat_template: str | None, special_tokens: dict[str, str]
    ) -> Tokenizer:
        """Makes an adapter's tokenizer. `vocabulary` and `chat_template`: the adapter's own; None: this tokenizer's."""
        special_tokens = self.special_tokens | special_tokens
        vocabulary = vocabulary or self.vocabulary
        end = vocabulary.backend.token_to_id(special_tokens.get("eos_token", ""))
        return Tokenizer(
            vocabulary,
            chat_template=ChatTemplate(chat_template, special_tokens) if chat_template else self._chat_template,
            end_token_ids=self.end_token_ids | ({end} if end is not None else set()),
            generation_defaults=self.generation_defaults,
            model_digest=self.model_digest,
            special_tokens=special_tokens,
            dialect=self._named_dialect,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turns text into ids. By default, adds the model's special tokens, such as a begin token.

        Raises BlockyardError FIELD_INVALID for half a surrogate pair, which JSON can contain but UTF-8 cannot.
        """
        return list(self._encode("prompt", text, add_special_tokens))

    def min_tokens(self, text: str, enough: int | None = None) -> int:
        """Returns a lower bound of a text's number of tokens, without encoding it: see `TextBounds`; 0: unknown."""
        return self.vocabulary.bounds.min_tokens(text, enough)

    def encode_steps(
        self, text: str, add_special_tokens: bool = True, *, enough: int | None = None, from_end: bool = False
    ) -> Steps[Encoded]:
        """Encodes a text as `encode` does, in steps. With `enough`, encodes only about that many tokens.

        `from_end`: whether these tokens are the text's last ones.
        """
        try:
            return (
                yield from encode_steps(
                    self.vocabulary, text, add_special_tokens=add_special_tokens, enough=enough, from_end=from_end
                )
            )
        except TypeError:
            raise _half_a_pair("prompt") from None

    @panics_as_errors()
    def _encode(self, field: str, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        try:
            return tuple(self.vocabulary.encode(text, add_special_tokens))
        except TypeError:
            raise _half_a_pair(field) from None

    def encode_bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Turns bad words into token sequences that must not be generated.

        Each word is encoded as at the beginning of a text. Its encoding after a space is added if that has the same
        number of tokens and another first token. This is vLLM's rule: longer encodings would forbid parts of other
        words.
        """
        sequences: list[tuple[int, ...]] = []
        for word in words:
            bare = word.lstrip(" ")
            # A word of only spaces is encoded unchanged.
            alone = self._encode("sampling.bad_words", bare or word)
            inside = self._encode("sampling.bad_words", f" {bare}") if bare else alone
            sequences.append(alone)
            if alone[:1] != inside[:1] and len(alone) == len(inside):
                sequences.append(inside)
        return list(filter(None, sequences))

    @panics_as_errors()
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turns ids into text. Ids outside of the vocabulary have no text."""
        # The library only accepts ids of 32 bits.
        known = [token_id for token_id in token_ids if 0 <= token_id < 2**32]
        # Unlike `decode`, a batch releases the interpreter's lock.
        return self.backend.decode_batch([known], skip_special_tokens=skip_special_tokens)[0]

    def piece(self, token_id: int) -> str:
        """Returns the vocabulary's spelling of an id; empty for an unknown id."""
        return self.backend.id_to_token(token_id) or ""

    def make_detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True, keeps_markers: bool = False
    ) -> Detokenizer:
        """Makes the incremental detokenizer of a sequence that continues a prompt.

        `keeps_markers`: whether the text keeps the special tokens that are the dialect's markers, for its parser.
        """
        return self._detokenizers.make(
            prompt_token_ids, skip_special_tokens=skip_special_tokens, keeps_markers=keeps_markers
        )

    def token_texts(self, *, skip_special_tokens: bool = True) -> TokenTexts:
        """Returns the texts of single tokens, for log probabilities."""
        return self._token_texts[skip_special_tokens]

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Renders messages as the prompt that the model was trained on; encode it with add_special_tokens=False.

        An order of roles that the template does not accept is changed to one that it accepts.

        Raises BlockyardError: FEATURE_DISABLED if the model has no template, FIELD_INVALID if the template refuses.
        """
        if self._chat_template is None:
            raise BlockyardError(
                Reason.FEATURE_DISABLED,
                "the model has no chat template: send a prompt, or start the gateway with --chat-template FILE",
            )
        return self._chat_template.render(
            **{"documents": None, **kwargs},
            messages=arrange(messages, self._chat_template.roles),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )


def _is_tag(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")


def _half_a_pair(field: str) -> BlockyardError:
    return invalid([Violation(field, "must be Unicode text, but contains half a surrogate pair")])
