"""How families of models are asked for the text between a prefix and a suffix: by tokens that they were trained with.

A tokenizer that has all markers of a row is of this row's family. The order of prefix and suffix is part of the row.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Hole(Enum):
    """A place for a text between the markers."""

    PREFIX = "prefix"
    SUFFIX = "suffix"


PREFIX, SUFFIX = Hole


class FillForm(NamedTuple):
    """The form of a prompt of one family.

    Attributes:
        parts: the markers, and the places of the prefix and the suffix.
        ends: tokens with which models of the family end what they fill in, besides their end tokens and the markers.
    """

    parts: tuple[str | Hole, ...]
    ends: tuple[str, ...] = ()


FORMS: Mapping[str, FillForm] = {
    "Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 3.3 and 4": FillForm(
        ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    "StarCoder, StarCoder2, Granite Code": FillForm(
        ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),
        ("<fim_pad>", "<repo_name>", "<file_sep>", "<|endoftext|>"),
    ),
    "SantaCoder": FillForm(
        ("<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>"), ("<fim-pad>", "<|endoftext|>")
    ),
    "Code Llama": FillForm(("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"), ("▁<EOT>",)),
    "DeepSeek-Coder": FillForm(("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>")),
    "Codestral": FillForm(("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),
}


class FillTokens(NamedTuple):
    """The form of a prompt in the tokens of one tokenizer.

    Attributes:
        parts: the markers' ids, and the places of the prefix and the suffix.
        end_token_ids: the ids that end what the model fills in, the markers among them.
    """

    parts: tuple[int | Hole, ...]
    end_token_ids: tuple[int, ...]

    def join(self, begin: Sequence[int], prefix: Sequence[int], suffix: Sequence[int]) -> array[int]:
        """Returns the ids of a prompt. `begin`: the tokens before the first marker."""
        texts = {PREFIX: prefix, SUFFIX: suffix}
        joined = array("I", begin)
        for part in self.parts:
            joined.extend(texts[part] if isinstance(part, Hole) else (part,))
        return joined


def find_fill_tokens(id_of: Callable[[str], int | None]) -> FillTokens | None:
    """Finds the form of a tokenizer's family; None if the tokenizer has no tokens for filling in.

    `id_of`: returns the id of a token by its text, or None.
    """
    for form in FORMS.values():
        parts = [part if isinstance(part, Hole) else id_of(part) for part in form.parts]
        known = tuple(part for part in parts if part is not None)
        if len(known) == len(parts):
            markers = [part for part in known if not isinstance(part, Hole)]
            ends = [end for end in map(id_of, form.ends) if end is not None]
            return FillTokens(known, tuple(dict.fromkeys((*markers, *ends))))
    return None
