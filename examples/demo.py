"""Starts the three services on the demo model, streams a text through gRPC, and stops them: what `make demo` runs."""

import sys
import time

import blockyard
from blockyard.errors import BlockyardError

PROMPT = 'class Message:\n    """'
# A choice that shows what a small model can do, and the same text at each run on a machine.
NUM_TOKENS = 92


def main() -> None:
    """Runs the demo."""
    begin = time.perf_counter()
    with blockyard.LLM() as llm:
        print(f"gateway, scheduler and worker are up after {time.perf_counter() - begin:.1f} s\n")
        print(PROMPT, end="", flush=True)
        begin, num_tokens = time.perf_counter(), 0
        for event in llm.stream(PROMPT, max_tokens=NUM_TOKENS, temperature=0.6, top_p=0.9, seed=5):
            if isinstance(event, blockyard.Delta):
                print(event.text, end="", flush=True)
                num_tokens = event.num_tokens
        seconds = time.perf_counter() - begin
    rate = num_tokens / seconds
    print(f"\n\n{num_tokens} tokens in {seconds:.2f} s ({rate:.0f} tokens/s), and everything is stopped again")


if __name__ == "__main__":
    try:
        main()
    except BlockyardError as error:
        sys.exit(str(error))
