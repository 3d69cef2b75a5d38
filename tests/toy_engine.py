"""An engine of one's own, as docs/rollouts.md says: a child process with a tiny HTTP server, weights by disk.

Run as a program it is the server: transformers' model behind POST /generate and POST /load. `wrong` breaks one thing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

from megatron_daro.engine.own import Answer

_CALL_S = 120


class Toy:
    """One server on a port of its own choice."""

    def __init__(self, *, model_path, replicas, seed, wrong="") -> None:
        if wrong == "constructor":
            raise RuntimeError("no such accelerator")
        self._path, self._wrong, self._process, self._url = model_path, wrong, None, ""

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, str(self._path), stdout=asyncio.subprocess.PIPE, env={**os.environ}
        )
        line = await asyncio.wait_for(self._process.stdout.readline(), _CALL_S)
        self._url = f"http://127.0.0.1:{int(line)}"

    async def answer(self, prompt_tokens, sampling, seed) -> Answer:
        body = {"tokens": prompt_tokens, "temperature": sampling.temperature, "most": sampling.max_new_tokens}
        said = await self._post("/generate", {**body, "stop": sampling.stop_token_ids, "seed": seed})
        tokens, logprobs = said["tokens"], said["logprobs"]
        if self._wrong == "tokens":
            tokens = tokens + [0] * sampling.max_new_tokens
        if self._wrong == "logprobs":
            logprobs = logprobs[:-1]
        return Answer(tokens, logprobs, "stop" if tokens[-1] in sampling.stop_token_ids else "length")

    async def load_weights(self, directory, version) -> None:
        if self._wrong != "stale":
            await self._post("/load", {"path": str(directory)})

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _post(self, path, body):
        def send():
            request = urllib.request.Request(self._url + path, json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=_CALL_S) as reply:
                return json.load(reply)

        return await asyncio.to_thread(send)


class WithoutLoad:
    """Lacks `load_weights`."""

    def __init__(self, *, model_path, replicas, seed) -> None:
        pass

    async def start(self) -> None: ...

    async def answer(self, prompt_tokens, sampling, seed) -> Answer: ...

    async def close(self) -> None: ...


class OtherAnswer(Toy):
    """Its `answer` takes one argument too few."""

    async def answer(self, prompt_tokens, sampling) -> Answer: ...


def serve(path) -> None:
    """Answer one call after the other until the parent is gone."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)]

    def generate(asked):
        generator = torch.Generator().manual_seed(asked["seed"])
        tokens, logprobs, temperature = list(asked["tokens"]), [], asked["temperature"]
        while len(logprobs) < asked["most"] and not (logprobs and tokens[-1] in asked["stop"]):
            with torch.no_grad():
                logits_V = models[0](torch.tensor([tokens])).logits[0, -1]
            logprobs_V = torch.log_softmax(logits_V / (temperature or 1.0), -1)
            drawn = torch.multinomial(logprobs_V.exp(), 1, generator=generator) if temperature else logits_V.argmax()
            tokens.append(int(drawn))
            logprobs.append(float(logprobs_V[tokens[-1]]))
        return {"tokens": tokens[len(asked["tokens"]) :], "logprobs": logprobs}

    def load(asked):
        models[0] = AutoModelForCausalLM.from_pretrained(asked["path"], dtype=torch.float32)
        return {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = json.dumps({"/generate": generate, "/load": load}[self.path](asked)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):
                self.wfile.write(reply)

        def log_message(self, *_) -> None:
            """Nothing."""

    parent, server = os.getppid(), HTTPServer(("127.0.0.1", 0), Handler)
    server.timeout = 1.0
    print(server.server_port, flush=True)
    while os.getppid() == parent:
        server.handle_request()


if __name__ == "__main__":
    serve(sys.argv[1])
