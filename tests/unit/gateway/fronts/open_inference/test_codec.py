from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.errors import BlockyardError, Reason
from blockyard.open_inference.v2 import open_inference_pb2 as messages
from gateway.fronts.open_inference.codec import read_inputs, write_outputs
from gateway.fronts.open_inference.tensors import Output
from tests.unit.gateway.fronts.open_inference.harness import add, tensors

DATATYPES = {"texts": "BYTES", "flag": "BOOL"}


def request_of(*inputs: tuple[str, str, list[Any]], raw: bool = False) -> messages.ModelInferRequest:
    request = messages.ModelInferRequest()
    for name, datatype, elements in inputs:
        add(request, name, datatype, elements, raw=raw)
    return request


def read(request: messages.ModelInferRequest, max_elements: int = 16) -> dict[str, list[Any]]:
    return read_inputs(request, DATATYPES, max_elements)


def error_of(request: messages.ModelInferRequest, **limits: int) -> BlockyardError:
    with pytest.raises(BlockyardError) as raised:
        read(request, **limits)
    return raised.value


def fields(error: BlockyardError) -> list[str]:
    return [violation.field for violation in error.violations]


@given(
    texts=st.lists(st.binary(max_size=20), max_size=16), flags=st.lists(st.booleans(), max_size=16), raw=st.booleans()
)
def test_what_is_sent_is_read(texts: list[bytes], flags: list[bool], raw: bool) -> None:
    request = request_of(("texts", "BYTES", texts), ("flag", "BOOL", flags), raw=raw)
    assert read(request) == {"texts": texts, "flag": flags}


@given(content=st.binary(max_size=40), length=st.integers(0, 16))
def test_any_raw_content_is_read_or_refused(content: bytes, length: int) -> None:
    request = messages.ModelInferRequest(raw_input_contents=[content])
    request.inputs.add(name="texts", datatype="BYTES", shape=[length])
    try:
        texts = read(request)["texts"]
    except BlockyardError as error:
        assert fields(error) == ["texts"]
    else:
        assert b"".join(struct.pack("<I", len(text)) + text for text in texts) == content
        assert len(texts) == length


def test_a_tensor_may_have_several_dimensions_or_none() -> None:
    request = request_of(("texts", "BYTES", [b"a", b"b"]))
    request.inputs[0].shape[:] = [2, 1, 1]
    assert read(request) == {"texts": [b"a", b"b"]}
    request = request_of(("flag", "BOOL", [True]))
    del request.inputs[0].shape[:]
    assert read(request) == {"flag": [True]}


@pytest.mark.parametrize("shape", [[3], [1], [-2, -1], [2] + [1] * 8, [0], [2**62, 4]], ids=str)
@pytest.mark.parametrize("raw", [False, True])
def test_a_shape_that_is_not_that_of_the_elements_is_refused(shape: list[int], raw: bool) -> None:
    request = request_of(("texts", "BYTES", [b"a", b"b"]), raw=raw)
    request.inputs[0].shape[:] = shape
    assert fields(error_of(request)) == ["texts"]


def test_raw_truth_values_of_another_number_are_refused() -> None:
    request = request_of(("flag", "BOOL", [True, False]), raw=True)
    request.inputs[0].shape[:] = [1]
    assert "1 bytes, not 2" in error_of(request).message


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\1", "has contents that end within the length of an element"),
        (b"\1\0\0\0", "has contents that end within an element"),
        (b"\xff\xff\xff\xffab", "has contents that end within an element"),
        (b"\1\0\0\0ab", "has contents that end within the length of an element"),
    ],
)
def test_raw_texts_that_end_too_soon_are_refused(content: bytes, told: str) -> None:
    request = messages.ModelInferRequest(raw_input_contents=[content])
    request.inputs.add(name="texts", datatype="BYTES", shape=[1])
    assert told in error_of(request).message


def test_the_number_of_elements_is_bounded_before_they_are_read() -> None:
    request = messages.ModelInferRequest(raw_input_contents=[bytes(2**20)])
    request.inputs.add(name="texts", datatype="BYTES", shape=[2**18])
    assert "at most 16 elements" in error_of(request).message
    # What the shape does not admit is not read either.
    request.inputs[0].shape[:] = [16]
    assert "not as many elements" in error_of(request).message


def test_every_wrong_tensor_is_told() -> None:
    request = request_of(("flag", "BYTES", [b"x"]), ("unknown", "BOOL", [True]))
    request.inputs[0].parameters["shared_memory_region"].string_param = "region"
    error = error_of(request)
    assert fields(error) == ["flag", "flag", "unknown"]
    assert [violation.reason for violation in error.violations] == [
        Reason.FIELD_INVALID,
        Reason.UNSUPPORTED_PARAMETER,
        Reason.FIELD_INVALID,
    ]


def test_a_tensor_that_is_there_twice_is_refused() -> None:
    assert fields(error_of(request_of(("flag", "BOOL", [True]), ("flag", "BOOL", [True])))) == ["flag"]


def test_more_tensors_than_there_are_names_are_not_looked_at() -> None:
    request = request_of(*[(f"t{number}", "BOOL", [True]) for number in range(100)])
    assert fields(error_of(request)) == ["inputs"]


def test_raw_contents_are_for_all_inputs_or_none() -> None:
    request = request_of(("texts", "BYTES", [b"a"]), ("flag", "BOOL", [True]), raw=True)
    del request.raw_input_contents[1]
    assert fields(error_of(request)) == ["raw_input_contents"]
    request = request_of(("texts", "BYTES", [b"a"]), raw=True)
    request.inputs[0].contents.bytes_contents.append(b"a")
    assert fields(error_of(request)) == ["texts"]


@pytest.mark.parametrize("raw", [False, True])
def test_what_is_written_is_read_by_clients(raw: bool) -> None:
    response = messages.ModelInferResponse()
    outputs = [
        Output("texts", "BYTES", ["wörld".encode(), b"", b"x"]),
        Output("counts", "UINT32", [0, 2**32 - 1]),
        Output("sums", "FP32", [-1.5]),
    ]
    write_outputs(response, outputs, raw=raw)
    assert bool(response.raw_output_contents) is raw
    assert tensors(response) == {output.name: output.elements for output in outputs}
    assert [output.datatype for output in response.outputs] == ["BYTES", "UINT32", "FP32"]
