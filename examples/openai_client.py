"""Chat with `octavo serve` through the official client (`pip install openai`).

OPENAI_BASE_URL says where the server is, unless it is http://127.0.0.1:8000/v1.
"""

from __future__ import annotations

import os

from openai import OpenAI


def main() -> None:
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OCTAVO_API_KEY", "none needed"),
    )
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is a book?"}],
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main()
