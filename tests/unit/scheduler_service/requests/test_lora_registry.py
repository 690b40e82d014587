from __future__ import annotations

import pytest

from blockyard.contract.scheduling import Adapter
from blockyard.errors import BlockyardError, Reason
from scheduler_service.requests.lora_registry import FIRST_SECOND, LoraRegistry


def make_adapter(lora_id: int, digest: str = "0" * 64) -> Adapter:
    return Adapter(lora_id, f"a{lora_id}", "/adapters/a", digest)


def test_a_number_that_no_scheduler_has_given_uses_up_no_others() -> None:
    registry = LoraRegistry(FIRST_SECOND + 10**7)
    first = registry.take_id()
    assert registry.take_over([make_adapter(first + 50)])
    assert not registry.take_over([make_adapter(2**32 - 1)])
    assert registry.take_id() == first + 51
    assert [adapter.lora_id for adapter in registry.named] == [first + 50]


def test_a_number_with_another_digest_is_refused() -> None:
    registry = LoraRegistry(FIRST_SECOND)
    registry.keep(make_adapter(5))
    with pytest.raises(BlockyardError, match="is 'a5'") as caught:
        registry.keep(make_adapter(5, "1" * 64))
    assert (caught.value.reason, caught.value.violations[0].field) == (Reason.FIELD_INVALID, "lora.digest")
