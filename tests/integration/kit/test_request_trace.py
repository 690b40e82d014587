"""A plain request passes through few files, and through none that belong to another feature. The ceilings only fall."""

from pathlib import Path

import pytest

from tests.kit.house.request_trace import trace_request

# Some calls fall before or behind the first token, as threads take turns.
MAX_FILES_TO_FIRST_SAMPLE = 95


@pytest.mark.timeout(120)
def test_a_plain_request_walks_few_files_and_no_other_feature(tmp_path: Path) -> None:
    trace = trace_request(tmp_path)
    files = frozenset().union(*trace.to_first_sample.values())
    assert len(files) <= MAX_FILES_TO_FIRST_SAMPLE, sorted(files)
    assert not trace.unused_features()
