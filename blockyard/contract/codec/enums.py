"""Maps an enum of the contract to the numbers of a generated one, and back. Both have the same names."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

Member = TypeVar("Member", bound=StrEnum)
Number = TypeVar("Number", bound=int)


class EnumCodec(Generic[Member, Number]):
    """The numbers of an enum's members.

    Args:
        members: the contract's enum.
        generated: names and numbers of the generated enum: its `items()`.
        prefix: stands before each name in the generated enum.
        zero: the member that UNSPECIFIED stands for; None: it stands for no member.
    """

    def __init__(
        self,
        members: type[Member],
        generated: Iterable[tuple[str, Number]],
        prefix: str,
        zero: Member | None = None,
    ) -> None:
        numbers = dict(generated)
        self._numbers = {member: numbers[prefix + member.name] for member in members}
        self._members: dict[int, Member] = {number: member for member, number in self._numbers.items()}
        if zero is not None:
            self._members[0] = zero

    def encode(self, member: Member) -> Number:
        return self._numbers[member]

    def decode(self, number: int) -> Member:
        """Returns the member with a number; what 0 stands for, for a number of a later version."""
        return self._members.get(number) or self._members[0]

    def find(self, number: int) -> Member | None:
        """Returns the member with a number; None for a number of a later version."""
        return self._members.get(number)
