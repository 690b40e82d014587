"""The client library: a whole answer, a stream, several sequences, token ids, a chat, and an error with its reasons.

Needs a gateway (`blockyard serve`), or several: python examples/python_client.py [ADDRESS[,ADDRESS...]]
"""

import sys

import blockyard
from blockyard.errors import BlockyardError

PROMPT = "def read_lines(path):\n"


def main() -> None:
    """Runs each example."""
    target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    with blockyard.Client(target) as client:
        client.wait_until_ready(timeout=60)
        (model,) = client.list_models()
        print(f"{model.name}: up to {model.max_model_len} tokens, results {model.determinism_id}")

        answer = client.generate(PROMPT, max_tokens=40, temperature=0.0)
        print(
            f"\n--- whole ({answer.usage.num_completion_tokens} tokens, {answer.finish_reason})\n{PROMPT}{answer.text}"
        )

        print("\n--- streamed")
        with client.stream(PROMPT, max_tokens=40, temperature=0.8, seed=1) as stream:
            for text in stream.text_deltas():
                print(text, end="", flush=True)
            # A gateway that dies meanwhile costs a pause, if another can be reached or it comes back.
            print(f"\n({stream.request_id}, read on after {stream.num_resumes} breaks)", end="")

        print("\n\n--- three sequences, until the first empty line")
        answer = client.generate(PROMPT, n=3, max_tokens=40, seed=2, stop=["\n\n"])
        for choice in answer.choices:
            print(f"{choice.index} ({choice.finish_reason}): {choice.text!r}")

        print("\n--- token ids")
        token_ids = client.tokenize(PROMPT)
        answer = client.generate(token_ids, max_tokens=5, temperature=0.0, return_token_ids=True)
        print(f"{token_ids} -> {list(answer.token_ids)} = {client.detokenize(answer.token_ids)!r}")

        print("\n--- a chat")
        messages = [blockyard.Message("user", "How do I read a file?")]
        with client.stream_chat(messages, max_tokens=40, temperature=0.0) as stream:
            for text in stream.text_deltas():
                print(text, end="", flush=True)
        print()

        print("\n--- an error lists everything that is wrong, at once")
        try:
            client.generate(PROMPT, top_p=7.0, max_tokens=0)
        except BlockyardError as error:
            for violation in error.violations:
                print(f"{violation.field}: {violation.description}")


if __name__ == "__main__":
    main()
