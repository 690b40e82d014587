from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from blockyard.errors import BlockyardError, Reason
from blockyard.service import faults
from blockyard.service.faults import Action, Fault, Faults, parse

# Reaches a point five times and tells each one that it outlived.
PROGRAM = """
from blockyard.service import faults
for number in range(1, 6):
    faults.reach(faults.AFTER_ANSWER)
    print(number, flush=True)
"""


def run(value: str | None) -> subprocess.Popen[str]:
    environment = {name: text for name, text in os.environ.items() if name != faults.VARIABLE}
    if value is not None:
        environment[faults.VARIABLE] = value
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_list_of_faults_is_read() -> None:
    assert parse("step.after_answer:kill@7, step.before_send:hang") == (
        Fault("step.after_answer", Action.KILL, 7),
        Fault("step.before_send", Action.HANG, 1),
    )
    assert parse("") == parse(" , ") == ()


@pytest.mark.parametrize("point", faults.POINTS)
@pytest.mark.parametrize("action", list(Action))
def test_a_fault_is_written_as_it_is_read(point: str, action: Action) -> None:
    fault = Fault(point, action, 12)
    assert parse(str(fault)) == (fault,)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("step.after_answer", "the form point:action@number"),
        ("step.after_answer:kill@0", "the form point:action@number"),
        ("step.after_answer:kill@x", "the form point:action@number"),
        ("step.at_noon:kill", "'step.at_noon' is none of step.before_send, "),
        ("step.after_send:laugh", "'laugh' is none of kill, hang, exit, error"),
    ],
)
def test_what_is_no_fault_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(f"step.before_send:kill,{text}")


def test_each_point_counts_for_itself_and_each_fault_comes_once() -> None:
    acted: list[Fault] = []
    two, one = Fault(faults.BEFORE_SEND, Action.KILL, 2), Fault(faults.AFTER_SEND, Action.HANG)
    armed = Faults([two, one], acted.append)
    armed.reach(faults.BEFORE_SEND)
    assert acted == []
    armed.reach(faults.AFTER_SEND)
    armed.reach(faults.BEFORE_PUBLISH)
    assert acted == [one]
    for _ in range(5):
        armed.reach(faults.BEFORE_SEND)
        armed.reach(faults.AFTER_SEND)
    assert acted == [one, two]


def test_an_error_is_one_that_crosses_boundaries() -> None:
    armed = Faults([Fault(faults.BEFORE_ANSWER, Action.ERROR)])
    with pytest.raises(BlockyardError, match=r"step\.before_answer:error@1") as raised:
        armed.reach(faults.BEFORE_ANSWER)
    assert raised.value.reason is Reason.BUG


@pytest.mark.parametrize(("action", "exit_code"), [("kill", -signal.SIGKILL), ("exit", faults.EXIT_CODE), ("error", 1)])
def test_a_process_ends_where_it_is_told_to(action: str, exit_code: int) -> None:
    process = run(f"step.after_answer:{action}@3")
    written, told = process.communicate(timeout=30)
    assert (process.returncode, written.split()) == (exit_code, ["1", "2"])
    assert "a fault on purpose" in told


def test_a_process_hangs_where_it_is_told_to_and_goes_on_when_woken() -> None:
    process = run("step.after_answer:hang@3")
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        written, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert written.split() == list("12345")


def test_without_the_variable_nothing_happens() -> None:
    process = run(None)
    written, told = process.communicate(timeout=30)
    assert (process.returncode, written.split(), told) == (0, list("12345"), "")


def test_a_wrong_value_ends_the_process_when_it_starts() -> None:
    process = run("step.after_answer:laugh")
    written, told = process.communicate(timeout=30)
    assert (process.returncode, written) == (1, "")
    assert "BLOCKYARD_FAULTS: 'laugh' is none of" in told


def test_it_is_off_in_production_and_costs_an_empty_call() -> None:
    assert faults.reach is faults._nothing
    # It looks nothing up and calls nothing.
    assert not faults._nothing.__code__.co_names
