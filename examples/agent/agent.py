"""A session with `tensortap mcp`: find a bug by asking its tools, and nothing else.

    python agent.py runs

A language model would choose the questions; here they are written down.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from mcp import Client, StdioServerParameters


async def main(folder: str) -> dict[str, Any]:
    command = ["-m", "tensortap", "mcp", folder]
    async with Client(StdioServerParameters(command=sys.executable, args=command)) as client:

        async def ask(tool: str, **arguments: Any) -> Any:
            result = await client.call_tool(tool, arguments)
            assert not result.is_error, result.content
            text = result.content[-1].text
            print(f"{tool} {arguments or ''}: {len(text.encode()):,} bytes", file=sys.stderr)
            return json.loads(text)

        # which runs there are, and what is wrong with the newest one
        runs = [row["id"] for row in (await ask("runs"))["rows"] if row["state"] != "live"]
        newest, before = runs[:2]
        first = (await ask("summary", run=newest))["first"]
        rules = [row["rule"] for row in (await ask("health", run=newest, state="problem"))["rows"]]
        alert = (await ask("alerts", run=newest, rule=first["rule"]))["rows"][0]
        # where it began, which line that is, and what the values were before
        module = alert["origin"] or alert["module"]
        verdict = (await ask("why", run=newest))["explanation"]
        names = (await ask("names", run=newest, pattern=f"^{module}$", kind="Activation"))["rows"]
        values = await ask("statistics", run=newest, name=names[0]["name"], kind="Activation",
                           statistics=["nans", "max_abs"], steps=f":{first['step']}")  # fmt: skip
        # since when the code differs from the run before
        difference = await ask("compare", a=newest, b=before)
        await ask("figure", run=newest, kind="Activation")
    return {
        "run": newest,
        "step": first["step"],
        "rules": rules,
        "module": module,
        "culprit": difference["culprit"],
        "last finite step": [row["step"] for row in values["rows"] if row["nans"] == 0][-1],
        "line": f"{verdict['file']}:{verdict['line']}",
        "code": verdict["source"][verdict["line"] - verdict["first_line"]].strip(),
        "why": verdict["why"],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1])), indent=1))
