"""The ceilings: compiled and run here, over less memory."""

import re
import subprocess

import pytest

from benchmarks.kernels import ceilings
from benchmarks.kernels.ceilings import INSTRUCTIONS, KINDS, Ceilings, Rate
from benchmarks.kit import processor


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", 8 << 20)
    monkeypatch.setattr(ceilings, "TURNS_OF_A_PASS", 1000)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_measures_every_ceiling(num_threads):
    measured = ceilings.measure(num_threads, seconds=0.05)
    assert measured.num_threads == num_threads
    assert list(measured.rates) == [each.name for each in INSTRUCTIONS if each.flag in processor.flags()]
    for rate in (measured.bandwidth, *measured.rates.values()):
        assert 0 < rate.median <= rate.best


def rates_of(**best: float) -> Ceilings:
    """Ceilings by the first words of instructions' names."""
    names = {each.name.partition(" ")[0]: each.name for each in INSTRUCTIONS}
    return Ceilings(1, Rate(1.0, 1.0), {names[name]: Rate(1.0, rate) for name, rate in best.items()})


def test_what_the_processor_lacks_stands_at_the_next_wider_type():
    assert {rates_of(vfmadd231ps=2.0).rate(kind).best for kind in KINDS} == {2.0}
    assert rates_of(vfmadd231ps=2.0, vdpbf16ps=4.0).rate("int8").best == 4.0


def test_a_slow_instruction_gives_way_to_one_for_a_wider_type():
    measured = rates_of(vfmadd231ps=2.0, vdpbf16ps=1.0, vpdpbusd=8.0)
    assert [measured.rate(kind).best for kind in KINDS] == [2.0, 2.0, 8.0]


def test_tiles_count_but_for_what_takes_none():
    measured = rates_of(vfmadd231ps=2.0, vdpbf16ps=1.0, vpdpbusd=8.0, tdpbf16ps=32.0, tdpbusd=64.0)
    assert [measured.rate(kind).best for kind in KINDS] == [2.0, 32.0, 64.0]
    assert [measured.rate(kind, on_tiles=False).best for kind in KINDS] == [2.0, 2.0, 8.0]


def test_tiles_that_the_system_refuses_are_not_used(monkeypatch):
    class Refusing:
        request_tiles = staticmethod(lambda: False)

    monkeypatch.setattr(ceilings, "_library", Refusing)
    monkeypatch.setattr(processor, "flags", lambda: ("fma", "amx_tile", "amx_bf16", "amx_int8"))
    assert [each.name for each in ceilings.usable_instructions()] == ["vfmadd231ps ymm"]


def test_a_processor_without_any_instruction_is_refused(monkeypatch):
    monkeypatch.setattr(processor, "flags", lambda: ())
    with pytest.raises(RuntimeError, match="FMA"):
        ceilings.usable_instructions()


def test_loops_of_tiles_are_there_on_every_processor(tmp_path):
    """Six sums, each of the same two other tiles: an instruction whose tiles are not three is invalid."""
    library = tmp_path / "ceilings.so"
    ceilings.compile_loops(library)
    code = subprocess.run(["objdump", "-d", str(library)], check=True, capture_output=True, text=True).stdout
    for name in ("tdpbf16ps", "tdpbusd"):
        assert re.findall(rf"{name} +%tmm7,%tmm6,%tmm(\d)", code) == list("012345")
    assert len(re.findall("tilerelease", code)) == len(re.findall("ldtilecfg", code)) == 2


def test_rates_of_passes():
    assert Rate.of(12.0, [2.0, 3.0, 4.0]) == Rate(median=4.0, best=6.0)


def test_passes_fill_the_time_and_are_never_few():
    assert ceilings.passes_for(1.0, [0.5, 0.01]) == 100
    assert ceilings.passes_for(0.0, [1.0]) == 5


def test_describes_for_people():
    text = ceilings.describe(Ceilings(2, Rate(3e9, 4e9), {"tdpbf16ps": Rate(1e9, 2e9)}))
    assert text.splitlines()[1].split() == ["bandwidth", "GB/s", "3.0", "4.0"]
    assert text.splitlines()[2].split() == ["tdpbf16ps", "bfloat16", "Gop/s", "1.0", "2.0"]
