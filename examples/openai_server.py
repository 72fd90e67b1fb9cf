"""A server of OpenAI's /v1/completions, by the standard library: `python openai_server.py [PORT]`.

Without PORT it asks itself the same question whole and as a stream, and ends. It then prints both
texts, and the error that a wrong request gets. It has no TLS and no authentication: put it behind a
proxy that has both, and that names the tenant in the header X-Tenant.
"""

import asyncio
import json
import sys
import urllib.error
import urllib.request
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import vllm_kernels
from vllm_kernels.integrations.transformers import AsyncEngine, Engine, SamplingParams

FOLDER = Path(vllm_kernels.__file__).parent / "toy_model"  # or your checkpoint
OPTIONS = ("max_tokens", "temperature", "top_p", "seed", "stop", "presence_penalty")
MAX_BODY = 1_000_000  # bytes


def completion(text, reason=None):
    """A body of an answer, or an event of a stream."""
    choice = {"index": 0, "text": text, "finish_reason": reason and reason.value}
    return json.dumps({"object": "text_completion", "model": FOLDER.name, "choices": [choice]})


async def send(writer, status, kind, body=""):
    """The head of an answer, and its body. The connection's end is the body's end."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"
    writer.write((head + body).encode())
    await writer.drain()


async def read_request(reader):
    """The options of the body, and the tenant. A request that is wrong raises ValueError."""
    first, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    if not first.startswith("POST /v1/completions "):
        raise ValueError(f"expected POST /v1/completions, got {first[:60]}")
    pairs = (field.partition(":") for field in fields)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    size = int(headers.get("content-length", 0))
    if size > MAX_BODY:
        raise ValueError(f"expected a body of at most {MAX_BODY} bytes, got {size}")
    body = json.loads(await reader.readexactly(size))
    return body, headers.get("x-tenant")


async def answer(engine, reader, writer):
    """One connection, and so one request."""
    try:
        body, tenant = await read_request(reader)
        options = {name: body[name] for name in OPTIONS if body.get(name) is not None}
        options.setdefault("temperature", 1.0)  # as OpenAI does; SamplingParams are greedy
        params = SamplingParams(**options)
        if not body.get("stream"):
            (output,) = await engine.generate([body["prompt"]], params, salt=tenant)
            (one,) = output.completions
            text = completion(one.text, one.finish_reason)
            await send(writer, "200 OK", "application/json", text)
            return
        # A client that goes away ends the loop with ConnectionError, which ends the request.
        async with aclosing(engine.stream(body["prompt"], params, salt=tenant)) as tokens:
            await send(writer, "200 OK", "text/event-stream")
            async for token in tokens:
                writer.write(f"data: {completion(token.text, token.finish_reason)}\n\n".encode())
                await writer.drain()
        writer.write(b"data: [DONE]\n\n")
    except (ValueError, TypeError, KeyError, AttributeError, asyncio.LimitOverrunError) as error:
        text = json.dumps({"error": {"message": f"{type(error).__name__}: {error}"}})
        await send(writer, "400 Bad Request", "application/json", text)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # the client has gone
    finally:
        with suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()


def ask(port, **body):
    """What a client does."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    with urllib.request.urlopen(url, json.dumps(body).encode()) as answered:
        return answered.read().decode()


async def main(port):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    async with AsyncEngine(Engine(model, tokenizer, max_length=256)) as engine:
        server = await asyncio.start_server(partial(answer, engine), "127.0.0.1", port or 0)
        if port:
            await server.serve_forever()
        port = server.sockets[0].getsockname()[1]
        options = {"prompt": "The for statement", "max_tokens": 8, "temperature": 0}
        whole = json.loads(await asyncio.to_thread(ask, port, **options))
        stream = await asyncio.to_thread(ask, port, **options, stream=True)
        *events, end = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
        pieces = [json.loads(event)["choices"][0]["text"] for event in events]
        print(repr(whole["choices"][0]["text"]))
        print(repr("".join(pieces)), end)
        try:
            await asyncio.to_thread(ask, port, prompt="x", max_tokens=-1)
        except urllib.error.HTTPError as error:
            print(error.code, json.loads(error.read())["error"]["message"])
        server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if sys.argv[1:] else None))
