"""The program of a worker that runs agents: one command per request, which ends with all that it started.

CommandAgents -> (this) -> the agent -> its exit status and the last line that it printed. Limits and protocol are those
of every worker (worker_pool/child.py), but the address space is not bounded: some interpreters reserve far more of it
than they use.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from megatron_daro.errors import SandboxError
from megatron_daro.process_tree import descendants, kill_all
from megatron_daro.sandbox import confined, exit_status
from megatron_daro.worker_pool.child import Answer, main

_LAST_BYTES = 65536
_SHOWN = 600


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the agent. Returns its exit status, its last line, the file REWARD_JSON if it wrote one, and the end of what
    it said on standard error."""
    with (
        tempfile.TemporaryFile() as said,
        tempfile.TemporaryFile() as complained,
        tempfile.TemporaryFile() as status,
        tempfile.TemporaryDirectory() as folder,
    ):
        file, command, endpoint = Path(folder) / "reward.json", request["command"], request["endpoint"]
        environment = {**request["environment"], "REWARD_JSON": str(file)}
        if endpoint:
            command = confined(command, folder=folder, endpoint=endpoint, status=status.fileno())
            environment |= {"HOME": folder, "TMPDIR": folder}
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=complained,
                env=environment,
                pass_fds=[status.fileno()] if endpoint else (),
            )
        except OSError as error:
            return {"reason": "failed", "error": f"{request['command'][0]}: {error.strerror}"}
        try:
            process.communicate(request["problem"].encode())
        finally:
            while started := descendants(os.getpid()):  # the worker adopts processes whose parents have ended
                kill_all(started)
                os.waitpid(-1, 0)
        lines, words = _last(said).strip().splitlines(), " ".join(_last(complained).split())
        line, written = lines[-1] if lines else "", None
        if file.is_file() and not file.is_symlink():
            with file.open("rb") as stream:
                written = stream.read(_LAST_BYTES).decode(errors="replace")
        try:
            ended = exit_status(_last(status)) if endpoint else process.returncode
        except SandboxError as error:
            return {"reason": "failed", "error": str(error)}
    return {"reason": "ok", "status": ended, "line": line, "file": written, "said": words[-_SHOWN:]}


def _last(file: IO[bytes]) -> str:
    file.seek(max(file.seek(0, os.SEEK_END) - _LAST_BYTES, 0))
    return file.read().decode(errors="replace")


def load(settings: dict[str, Any]) -> Answer:
    """Return `answer`, which needs nothing."""
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], load, bounds_addresses=False))
