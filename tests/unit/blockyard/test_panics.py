"""Panics of libraries written in Rust become errors; everything else is left as it is."""

from __future__ import annotations

import pytest

from blockyard.panics import ExtensionPanic, panics_as_errors
from tests.kit.panics import panic


def test_a_panic_is_no_exception_and_becomes_one() -> None:
    with pytest.raises(BaseException) as raised:
        panic()
    assert not isinstance(raised.value, Exception)
    with pytest.raises(ExtensionPanic) as error, panics_as_errors():
        panic()
    # It would quote what a client sent.
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__
    assert "🙂" not in str(error.value)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("a")])
def test_other_errors_pass(error: BaseException) -> None:
    @panics_as_errors()
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        fail()
    assert raised.value is error
