"""vLLM's build for CPUs, offline, in one process: its engine core beside the caller instead of behind a socket.

Its documentation asks for tcmalloc and Intel's OpenMP to be preloaded; benchmarks/peers.py does that. The KV cache has
room for every batch, and no text is made of the tokens.
"""

from __future__ import annotations

import os

from job import Job

JOB = Job.read()
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{JOB.num_threads - 1}")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm

from benchmarks.kit.batch_process import Line, serve_batches


def main() -> None:
    """Serves batches."""
    line = Line()
    if JOB.kind != "bfloat16":
        raise SystemExit("vllm_cpu: quantized weights would have to come quantized")
    llm = vllm.LLM(
        model=JOB.model,
        dtype=JOB.kind,
        max_model_len=JOB.max_len,
        max_num_seqs=JOB.max_num_seqs,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        seed=0,
    )

    def run(prompts: list[list[int]], num_output_tokens: int) -> int:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True, detokenize=False)
        given = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        answers = llm.generate(given, sampling, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    serve_batches(run, line, version=vllm.__version__)


if __name__ == "__main__":
    main()
