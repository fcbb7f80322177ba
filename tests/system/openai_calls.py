"""Runs calls of the `openai` package and tells what came of each, as JSON lines; runs in an environment of its own.

A line of standard input is a call: its `api` (completions or chat.completions), its `arguments`, and, where the client
is to leave a stream, `leave_after` so many chunks. Each is answered by a line: the response, the list of a stream's
chunks, or `{"error": STATUS, "message": ...}`.
"""

import json
import sys
from typing import Any

import openai


def main(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        for line in sys.stdin:
            print(json.dumps(answer(client, **json.loads(line))), flush=True)


def answer(client: openai.OpenAI, api: str, arguments: dict[str, Any], leave_after: int | None = None) -> Any:
    create = (client.chat.completions if api == "chat.completions" else client.completions).create
    try:
        response = create(**arguments)
        if not arguments.get("stream"):
            return response.model_dump()
        chunks = []
        with response:
            for chunk in response:
                chunks.append(chunk.model_dump())
                if len(chunks) == leave_after:
                    break
        return chunks
    except openai.APIStatusError as error:
        return {"error": error.status_code, "message": str(error)}


if __name__ == "__main__":
    main(sys.argv[1])
