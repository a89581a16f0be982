"""Continue several prompts at once, then answer a conversation, without a server."""

from __future__ import annotations

from octavo import LLM, SamplingParams


def main() -> None:
    llm = LLM()  # the default model; or LLM("path/to/folder"), LLM("model.gguf"), LLM("org/name")

    prompts = ["The capital of France is", "Two and two make", "An octavo is a"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
        print(f"{output.prompt}|{output.outputs[0].text}")

    messages = [{"role": "user", "content": "Name a primary colour."}]
    sampling = SamplingParams(n=2, temperature=0.8, seed=7, max_tokens=24)
    for answer in llm.chat(messages, sampling)[0].outputs:
        print(f"{answer.index}: {answer.text} ({answer.finish_reason})")


if __name__ == "__main__":
    main()
