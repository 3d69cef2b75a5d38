"""An agent for tests/tiny_task.py: two turns of one chat, then a chat anew, of which the first answer is judged.

As a program it needs no package; `environment.options.at_once` makes it ask two chats at once, with a text that ends
their answers, and `waits`, a folder, makes it leave a file there after its first answer, and wait for another, `go`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def say(messages: list, **others) -> dict:
    """Return the assistant's message, without a client."""
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 4, **others}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]


def wait(folder: Path) -> None:
    """Say that there is an answer, and wait until the test has done what it does meanwhile."""
    (folder / str(os.getpid())).touch()
    while not (folder / "go").exists():
        time.sleep(0.1)


def user(text: str) -> dict:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def main() -> None:
    """Hold the conversation of one problem."""
    problem = json.load(sys.stdin)
    digit = problem["statement"].strip("=")
    first = say([user(digit)])
    if waits := problem["options"].get("waits"):
        wait(Path(waits))
    say([user(digit), {"role": "assistant", "content": first["content"]}, user("7")])
    say([user(digit), user(digit)])
    if problem["options"].get("at_once"):
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda text: say([user(text), user("3")], stop=["####"]), (digit, "5")))
    print(json.dumps({"answer": first["content"]}))


if __name__ == "__main__":
    main()
