"""OpenVINO GenAI's continuous batching on the CPU, from the model as optimum-intel exports it.

Weights are kept as float16 or int8 and computed with in bfloat16, unless the plugin knows better for int8; its KV cache
stays what it is by default.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openvino
import openvino_genai
from job import Job

from benchmarks.kit.batch_process import Line, serve_batches

WEIGHT_FORMATS = {"bfloat16": "fp16", "int8": "int8"}
CACHE_GIB = 2


def export(job: Job) -> Path:
    """Exports the model, unless it was."""
    target = job.made(f"openvino-{WEIGHT_FORMATS[job.kind]}")
    if not (target / "openvino_model.xml").exists():
        command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "--model", job.model]
        command += ["--task", "text-generation-with-past", "--weight-format", WEIGHT_FORMATS[job.kind], str(target)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return target


def main() -> None:
    """Serves batches."""
    line, job = Line(), Job.read()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs = job.max_num_seqs
    scheduler.max_num_batched_tokens = 2048
    options = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": job.num_threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(export(job)), scheduler, "CPU", options)

    def run(prompts: list[list[int]], num_output_tokens: int) -> int:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=num_output_tokens, min_new_tokens=num_output_tokens, ignore_eos=True, do_sample=False
        )
        given = [openvino.Tensor([prompt]) for prompt in prompts]
        answers = pipeline.generate(given, [config] * len(prompts))
        return sum(len(answer.m_generation_ids[0]) for answer in answers)

    serve_batches(run, line, version=openvino_genai.__version__)


if __name__ == "__main__":
    main()
