"""Chooses the instruction set for a processor, only by a table of its features and its vendor.

It does not measure speed at start: after a restart under load, on another rank or on a replica of the same hardware the
results must have the same bits. `benchmarks/instruction_sets.py` checks the table on a machine. The
entries of both makers were measured with it.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blockyard_kernels.cpu.build import library_path

AMD = "AuthenticAMD"
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"})


@dataclass(frozen=True, slots=True)
class Choice:
    """An instruction set for which there are kernels.

    Attributes:
        name: the name of the library.
        features: the flags in /proc/cpuinfo that a processor must have.
        maker: the vendor whose processors take it for "auto"; None: any vendor. Others take it only by name.
        emulates: whether it emulates the arithmetic of another processor, for tests. Only taken by name.
    """

    name: str
    features: frozenset[str]
    maker: str | None = None
    emulates: bool = False


TABLE = (
    Choice("amx", _AVX512 | {"amx_tile", "amx_bf16", "amx_int8"}),
    # Intel's processors compute bfloat16 products faster with float32 instructions, as "avx512" does.
    Choice("avx512_bf16", _AVX512 | {"avx512_bf16", "avx512_vnni"}, AMD),
    Choice("avx512", _AVX512),
    Choice("avx2", frozenset({"avx2", "fma", "f16c"})),
    Choice("amx_emulated", _AVX512, emulates=True),
)
"""Best first."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor that this process runs on; `features` is empty if our kernels cannot run on it."""

    maker: str
    features: frozenset[str]

    @classmethod
    def read(cls) -> Processor:
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            return cls("", frozenset())
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        facts: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
        return cls(facts.get("vendor_id", ""), frozenset(facts.get("flags", "").split()))

    def supported(self) -> tuple[Choice, ...]:
        """Lists the instruction sets that the processor can execute, best first."""
        return tuple(choice for choice in TABLE if choice.features <= self.features)

    def chosen(self) -> tuple[Choice, ...]:
        """Lists the instruction sets that "auto" tries, best first, until one passes its self-test."""
        return tuple(each for each in self.supported() if each.maker in (None, self.maker) and not each.emulates)


@cache
def this_processor() -> Processor:
    return Processor.read()


def supported_instruction_sets() -> tuple[str, ...]:
    """Lists this processor's instruction sets that have kernels, best first by the table; emulated ones last."""
    return tuple(choice.name for choice in this_processor().supported())


def available_instruction_sets() -> tuple[str, ...]:
    """Lists this processor's instruction sets whose library is built, best first, without emulated ones."""
    own = (choice.name for choice in this_processor().supported() if not choice.emulates)
    return tuple(name for name in own if library_path(name).exists())


def chosen_instruction_sets() -> tuple[str, ...]:
    """Lists the instruction sets that "auto" tries and whose library is built, best first."""
    return tuple(each.name for each in this_processor().chosen() if library_path(each.name).exists())
