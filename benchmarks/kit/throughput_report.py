"""The results of benchmarks/throughput.py as markdown, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.kit.figures import number, percent

if TYPE_CHECKING:
    from collections.abc import Iterable

PROCESSES = ("worker", "scheduler", "gateway", "client")


def report(results: dict[str, Any]) -> str:
    """Everything that was measured, the most asked for first."""
    parts = (_head(results), _rates(results), _costs(results), _rest(results))
    return "\n\n".join(parts) + "\n"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _head(results: dict[str, Any]) -> str:
    settings, workload = results["settings"], results["workload"]
    kind = " ".join(filter(None, (settings["dtype"], settings["quantization"])))
    lengths = f"{workload['prompt_tokens']} prompt and {workload['output_tokens']} output tokens a request"
    rounds = f"Medians of {workload['rounds']} rounds (least–most); kernels {settings['kernels']}; load before them"
    rounds += f" {settings['load']:.2f}."
    return f"# {settings['model']}, {kind}: {lengths}\n\n{rounds}"


def _rates(results: dict[str, Any]) -> str:
    heads = ("requests", "ideal, tok/s", "worker alone", "whole system", "streamed")
    heads += ("alone / ideal", "system / ideal", "streamed / ideal", "system / alone", "streamed / alone")
    rows: list[list[str]] = []
    for requests, measured in results["requests"].items():
        rates, shares, ratios = measured["tokens_per_second"], measured["share_of_ideal"], measured["system_over_alone"]
        row = [requests, *(number(rates[name]) for name in ("ideal", "alone", "generate", "stream"))]
        row += [percent(shares[name]) for name in ("alone", "generate", "stream")]
        rows.append([*row, percent(ratios["generate"]), percent(ratios["stream"])])
    return _table(heads, rows)


def _costs(results: dict[str, Any]) -> str:
    rows: list[list[str]] = []
    for requests, measured in results["requests"].items():
        for api, spent in measured["cpu_seconds_per_1000_tokens"].items():
            rows.append([requests, api, *(number(spent[name], 3) for name in PROCESSES)])
    return "CPU seconds per 1,000 tokens:\n\n" + _table(("requests", "api", *PROCESSES), rows)


def _rest(results: dict[str, Any]) -> str:
    ceilings, onednn, prefill, memory = (results[name] for name in ("ceilings", "onednn", "prefill", "memory"))
    kinds = ("bandwidth", "bfloat16", "float32", "int8")
    giga = {name: f"{ceilings[name]['median'] / 1e9:.1f}" for name in kinds}
    lines = [
        f"- Ceilings of {ceilings['num_threads']} threads: {giga['bandwidth']} GB/s; bfloat16 {giga['bfloat16']},"
        f" float32 {giga['float32']}, int8 {giga['int8']} billion operations a second.",
        f"- oneDNN on the model's matrices: {onednn['whole_layer'] / 1e9:.1f} billion operations a second over a"
        f" layer, {onednn['best_product'] / 1e9:.1f} at best.",
        f"- A prompt of {prefill['num_tokens']} tokens: {percent(prefill['share_alone'])} of the ceiling by the worker"
        f" alone ({number(prefill['seconds_alone'], 3)} s), {percent(prefill['share_system'])} through the system.",
        f"- The worker's peak memory: {memory['peak_bytes'] / 1e6:.0f} MB, of at most {memory['limit_bytes'] / 1e6:.0f}"
        f" (weights {memory['weights_bytes'] / 1e6:.0f}, KV pool {memory['kv_pool_bytes'] / 1e6:.0f}).",
        f"- From the start of the processes to the first token: {results['first_token_seconds']:.2f} s.",
    ]
    return "\n".join(lines)
