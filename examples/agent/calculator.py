"""An agent: the model, by OpenAI's client, and a calculator. `environment.kind: calculator:solve`."""

import re

CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
PRODUCT = re.compile(r"print\((\d+)([*+-])(\d+)\)")


def calculate(code):
    """Return what `print(34*567)` prints; nothing for any other code."""
    if found := PRODUCT.fullmatch(code.strip()):
        left, sign, right = int(found[1]), found[2], int(found[3])
        return str({"*": left * right, "+": left + right, "-": left - right}[sign])
    return ""


async def solve(problem, client):
    messages = [{"role": "user", "content": problem.statement}]
    for _ in range(3):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        said = reply.choices[0].message
        called = CODE.search(said.content)
        if not called:
            break
        shown = f"\n```output\n{calculate(called[1])}\n```\n"
        messages += [said, {"role": "tool", "tool_call_id": "0", "content": shown}]
    return said.content  # which reward.verifier judges
