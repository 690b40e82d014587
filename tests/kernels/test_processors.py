"""What serves a processor follows from its features and its maker."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockyard_kernels.cpu import processors
from blockyard_kernels.cpu.build import EMULATED_SETS, INSTRUCTION_SETS
from blockyard_kernels.cpu.processors import TABLE, Processor
from blockyard_kernels.select import CPU_KERNELS

AVX2 = "avx2 fma f16c sse4_2"
AVX512 = AVX2 + " avx512f avx512dq avx512vl avx512bw"
BF16 = AVX512 + " avx512_bf16 avx512_vnni"
AMX = BF16 + " amx_tile amx_bf16 amx_int8"


def read(flags: str, maker: str, monkeypatch: pytest.MonkeyPatch, machine: str = "x86_64") -> Processor:
    one = f"vendor_id\t: {maker}\nmodel name\t: one\nflags\t\t: {flags}\nbugs\t\t: none\n"
    text = f"processor\t: 0\n{one}\nprocessor\t: 1\n{one}"
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_kwargs: text)
    monkeypatch.setattr(processors.platform, "system", lambda: "Linux")
    monkeypatch.setattr(processors.platform, "machine", lambda: machine)
    return Processor.read()


@pytest.mark.parametrize(
    ("maker", "flags", "chosen", "forced"),
    [
        ("GenuineIntel", "sse4_2", [], []),
        ("GenuineIntel", "avx2 sse4_2", [], []),
        ("GenuineIntel", AVX2, ["avx2"], ["avx2"]),
        ("AuthenticAMD", AVX2 + " avx512f avx512dq avx512vl", ["avx2"], ["avx2"]),
        ("AuthenticAMD", AVX512, ["avx512", "avx2"], ["avx512", "avx2"]),
        ("AuthenticAMD", AVX512 + " avx512_bf16", ["avx512", "avx2"], ["avx512", "avx2"]),
        ("AuthenticAMD", BF16, ["avx512_bf16", "avx512", "avx2"], ["avx512_bf16", "avx512", "avx2"]),
        # Slow at VDPBF16PS.
        ("GenuineIntel", BF16, ["avx512", "avx2"], ["avx512_bf16", "avx512", "avx2"]),
        ("GenuineIntel", AMX, ["amx", "avx512", "avx2"], ["amx", "avx512_bf16", "avx512", "avx2"]),
        ("GenuineIntel", AMX.replace(" amx_int8", ""), ["avx512", "avx2"], ["avx512_bf16", "avx512", "avx2"]),
    ],
)
def test_a_processor_takes_what_the_table_says(
    maker: str, flags: str, chosen: list[str], forced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = read(flags, maker, monkeypatch)
    assert processor.maker == maker
    assert [choice.name for choice in processor.chosen()] == chosen
    assert [choice.name for choice in processor.supported() if not choice.emulates] == forced


def test_another_architecture_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(AMX, "GenuineIntel", monkeypatch, "aarch64").supported() == ()


def test_the_table_lists_what_is_built_and_what_may_be_asked_for() -> None:
    assert {choice.name for choice in TABLE if not choice.emulates} == set(INSTRUCTION_SETS)
    assert {choice.name for choice in TABLE if choice.emulates} == set(EMULATED_SETS)
    assert set(CPU_KERNELS) == {"auto", *INSTRUCTION_SETS, "reference"}
