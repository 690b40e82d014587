"""llama.cpp by way of llama-cpp-python's bindings: one context, all sequences of a batch decoded together.

Its own server batches in the same way; this loop spares it HTTP and sampling beyond the largest logit.
"""

from __future__ import annotations

import ctypes
import functools

import llama_cpp
import numpy as np
from job import Job
from make_gguf import write_gguf

from benchmarks.kit.batch_process import Line, serve_batches

MAX_BATCH_TOKENS = 2048


class Batches:
    """A context, and batches of prompts answered greedily in it."""

    def __init__(self, job: Job) -> None:
        llama_cpp.llama_backend_init()
        _be_silent()
        model_parameters = llama_cpp.llama_model_default_params()
        path = write_gguf(job.model, job.made(f"{job.kind}.gguf"), job.kind)
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_parameters)
        assert self._model, path
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = job.max_num_seqs * job.max_len
        parameters.n_batch = MAX_BATCH_TOKENS
        parameters.n_seq_max = job.max_num_seqs
        parameters.n_threads = parameters.n_threads_batch = job.num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        assert self._context
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)

    def run(self, prompts: list[list[int]], num_output_tokens: int) -> int:
        """Answers prompts, and returns how many tokens that took."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        last_ids = self._prefill(prompts)
        num_tokens = len(prompts)
        for position in range(len(prompts[0]), len(prompts[0]) + num_output_tokens - 1):
            rows = [(token_id, position, number, True) for number, token_id in enumerate(last_ids)]
            last_ids = self._decode(rows)
            num_tokens += len(last_ids)
        return num_tokens

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """Computes prompts, as many whole ones at a time as fit; returns the first token of each answer."""
        first_ids: list[int] = []
        at_a_time = max(1, MAX_BATCH_TOKENS // len(prompts[0]))
        for begin in range(0, len(prompts), at_a_time):
            some = prompts[begin : begin + at_a_time]
            first_ids += self._decode(
                [
                    (token_id, position, begin + number, position == len(prompt) - 1)
                    for number, prompt in enumerate(some)
                    for position, token_id in enumerate(prompt)
                ]
            )
        return first_ids

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Computes (token id, position, sequence, whether its logits are wanted), and returns the likeliest ids."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for number, (token_id, position, sequence, is_wanted) in enumerate(rows):
            batch.token[number] = token_id
            batch.pos[number] = position
            batch.n_seq_id[number] = 1
            batch.seq_id[number][0] = sequence
            batch.logits[number] = is_wanted
        code = llama_cpp.llama_decode(self._context, batch)
        assert code == 0, code
        return [self._likeliest(number) for number, row in enumerate(rows) if row[3]]

    def _likeliest(self, number: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, number)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


@functools.cache
def _silence() -> ctypes._Pointer:
    return llama_cpp.llama_log_callback(lambda level, text, data: None)


def _be_silent() -> None:
    llama_cpp.llama_log_set(_silence(), ctypes.c_void_p(0))


def main() -> None:
    """Serves batches."""
    line = Line()
    batches = Batches(Job.read())
    serve_batches(batches.run, line, version=llama_cpp.__version__)


if __name__ == "__main__":
    main()
