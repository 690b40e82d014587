"""What comes out of an answer is the same however it is cut, and nothing of it is lost."""

from __future__ import annotations

import pytest

from tests.unit.gateway.dialects.reading import pieces_of, read

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call> \\" }", "n": [1, {"y": 1.50}]}}\n</tool_call>'
# The answer, and what comes out: text, reasoning, calls.
ANSWERS = {
    "text alone": ("Hello <b>, \n", "Hello <b>, \n", "", ()),
    "a call": (CALL, "", "", (("f", '{"x": "</tool_call> \\" }", "n": [1, {"y": 1.50}]}'),)),
    "text before and behind": (f"Let me see.\n{CALL}\nWell.", "Let me see.Well.", "", (("f", None),)),
    "two": (
        f'{CALL}\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call>',
        "",
        "",
        (("f", None), ("g", "{}")),
    ),
    "arguments first": ('<tool_call>{"arguments": {"x": 1 }, "name": "g"}</tool_call>', "", "", (("g", '{"x": 1 }'),)),
    "no arguments": ('<tool_call>{"name": "g"}</tool_call>', "", "", (("g", "{}"),)),
    "arguments as text": (
        '<tool_call>{"name": "g", "arguments": "{\\"x\\": \\"\\ud83d\\ude00\\u00e9\\n\\"}"}</tool_call>',
        "",
        "",
        (("g", '{"x": "😀é\n"}'),),
    ),
    "reasoning": ("<think>\nHm, <tool_call>?\n</think>\n\nYes.", "Yes.", "Hm, <tool_call>?", ()),
    "no reasoning": ("<think>\n\n</think>\n\nYes.", "Yes.", "", ()),
    "a marker within text": ("A <think> tag.", "A <think> tag.", "", ()),
    "an unknown tool": ('<tool_call>{"name": "h", "arguments": {}}</tool_call> .', None, "", ()),
    "no object": ("<tool_call>f(1)</tool_call>", None, "", ()),
    "another key": ('<tool_call>{"tool": "f"}</tool_call>', None, "", ()),
    "a brace missing": ('<tool_call>{"name": "g", "arguments": {"x": 1}</tool_call>', "", "", (("g", '{"x": 1}'),)),
    "cut within arguments": ('<tool_call>{"name": "g", "arguments": {"x": "a', "", "", (("g", '{"x": "a'),)),
    "broken arguments": ('<tool_call>{"name": "g", "arguments": {"x": </tool_call>!', "!", "", (("g", '{"x": '),)),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_is_told_apart_alike_however_it_is_cut(case: str) -> None:
    answer, text, reasoning, calls = ANSWERS[case]
    whole = read("hermes", [answer])
    assert (whole.text, whole.reasoning) == (answer if text is None else text, reasoning)
    told = [(name, arguments) for name, _, arguments in whole.calls]
    assert [name for name, _ in told] == [name for name, _ in calls]
    assert all(due in (None, found) for (_, found), (_, due) in zip(told, calls, strict=True))
    assert read("hermes", list(answer)) == whole
    for cut in range(len(answer)):
        assert read("hermes", pieces_of(answer, [cut])) == whole
