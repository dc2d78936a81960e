"""The other side of generators.py: LLMeter, in an interpreter that has it. Reads one JSON object, writes one.

In: base_url, model, max_tokens, clients (a list of lists of prompts). Out: sending time, TTFT, time to last token, output tokens of each request."""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any

from llmeter.endpoints.openai import OpenAICompletionStreamEndpoint
from llmeter.runner import Runner


def payload(prompt: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "extra_body": {"ignore_eos": True}}


async def run(asked: dict[str, Any]) -> dict[str, Any]:
    """A runner for each client, since the clients of one runner all send the same prompts."""
    endpoints = [OpenAICompletionStreamEndpoint(asked["model"], api_key="none", base_url=asked["base_url"], max_retries=0) for _ in asked["clients"]]
    results = await asyncio.gather(
        *(
            Runner(endpoint, timeout=600).run(
                payload=[payload(prompt, asked["max_tokens"]) for prompt in prompts], n_requests=len(prompts), clients=1
            )
            for endpoint, prompts in zip(endpoints, asked["clients"], strict=True)
        )
    )
    answers = [response for result in results for response in result.responses]
    if failed := [response.error for response in answers if response.error]:
        raise SystemExit(f"{len(failed)} of {len(answers)} requests failed, first: {failed[0]}")
    rows = [
        (response.request_time.timestamp(), response.time_to_first_token, response.time_to_last_token, response.num_tokens_output)
        for response in answers
    ]
    return {"version": version("llmeter"), "requests": rows}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.load(sys.stdin)))))
