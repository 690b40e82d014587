"""The OpenAI API by OpenAI's own client: models, a completion, a chat, a stream, an error.

Needs a gateway (`blockyard serve`): python examples/openai_client.py [URL]
"""

import sys

import openai

PROMPT = "def read_lines(path):\n"


def main() -> None:
    """Runs each example against one gateway."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        model = next(iter(client.models.list())).id
        print(f"model: {model}")

        completion = client.completions.create(model=model, prompt=PROMPT, max_tokens=40, temperature=0)
        print(f"\n--- completion ({completion.choices[0].finish_reason})\n{PROMPT}{completion.choices[0].text}")

        print("\n--- completion, streamed, with a parameter that OpenAI does not have")
        stream = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=40, seed=1, stream=True, extra_body={"top_k": 20}
        )
        for chunk in stream:
            print(chunk.choices[0].text, end="", flush=True)

        question = "What does os.path.join do?"
        chat = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], max_completion_tokens=60, temperature=0
        )
        print(f"\n\n--- chat\n{question}\n{chat.choices[0].message.content}\n{chat.usage}")

        print("\n--- an error")
        try:
            client.completions.create(model=model, prompt=PROMPT, top_p=7, presence_penalty=-3)
        except openai.BadRequestError as error:
            print(f"{error.status_code} {error.code} {error.param}: {error.body}")


if __name__ == "__main__":
    main()
