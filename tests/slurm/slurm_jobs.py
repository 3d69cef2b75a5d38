"""A real Slurm of two nodes on this machine, and jobs on it as users submit them.

Both nodes are this machine: they are told apart by 127.0.0.11 and 127.0.0.12. Only processes of the jobs of these tests
are ever signalled; they are known by an environment variable that they inherit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

HERE = Path(__file__).parent
MARK = "MEGATRON_DARO_SLURM_TEST"
LIMIT_S = 240.0


class Slurm:
    """The cluster. `path` has configuration, state and logs; `settings` are those of up.sh."""

    def __init__(self, path: Path, **settings: str) -> None:
        self.environment = {**os.environ, "R": str(path), "SLURM_CONF": str(path / "etc" / "slurm.conf"), **settings}
        self.environment.pop("RAY_ADDRESS", None)
        self.path = path

    def up(self) -> None:
        code, said = self._script("up.sh")
        assert code == 0, said

    def down(self) -> None:
        self._script("down.sh")

    def lose(self, node: str) -> None:
        """Kill the daemon of a node, as when it loses power; what runs there is the caller's."""
        os.kill(int((self.path / "run" / f"slurmd.{node}.pid").read_text()), signal.SIGKILL)

    def run(self, *command: object, check: bool = True) -> str:
        """What a command of Slurm, or of ours, prints; both streams where it fails."""
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, env=self.environment, timeout=120, check=False
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + ("" if check else done.stderr)

    def _script(self, name: str) -> tuple[int, str]:
        """Exit code and output; by way of a file, since the daemons would keep a pipe open."""
        with tempfile.TemporaryFile("w+") as log:
            command = ["bash", str(HERE / name)]
            done = subprocess.run(command, stdout=log, stderr=log, env=self.environment, timeout=120, check=False)
            log.seek(0)
            return done.returncode, log.read()


class SlurmJob:
    """A run that was submitted."""

    def __init__(self, slurm: Slurm, recipe: Path, run_dir: Path, cluster: dict[str, Any], *options: str) -> None:
        self.slurm, self.run_dir, self.mark = slurm, run_dir, uuid.uuid4().hex
        file = run_dir.with_suffix(".cluster.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        site = {
            "partition": "main",
            "nodes": 2,
            "gpus_per_node": 0,
            "cpus_per_node": 2,  # so the policy's two ranks are on one node, and what serves on the other
            "exclusive": False,
            "time": "00:20:00",
            "python": sys.executable,
            "term_grace_s": 5,
            "free_disk_gib": 0.1,
            "addresses": {f"node{i}": f"127.0.0.1{i}" for i in range(1, 5)},
            **cluster,
        }
        site["environment"] = {"OMP_NUM_THREADS": "1", MARK: self.mark, **site.get("environment", {})}
        file.write_text(yaml.safe_dump(site))
        where = f"trainer.run_dir={json.dumps(str(run_dir))}"  # as YAML: it may have a # or quotes
        self.command = (sys.executable, "-m", "megatron_daro", "submit", recipe, where, *options)
        self.command += ("--cluster", file)
        said = slurm.run(*self.command)
        self.numbers = said.split("submitted: ")[1].split(" (")[0].split(", ")
        self.number = self.numbers[0]

    @property
    def log(self) -> str:
        """What the batch script printed so far."""
        file = self.run_dir / "slurm" / f"job_{self.number}.log"
        return file.read_text() if file.exists() else ""

    @property
    def state(self) -> str:
        """Slurm's word for where the job is."""
        return self.slurm.run("squeue", "-h", "-t", "all", "-j", self.number, "-o", "%T").strip()

    def folder_of_attempt(self) -> Path:
        """The directory of the newest attempt, there or not."""
        return max((self.run_dir / "slurm").glob("attempt_*"), default=self.run_dir / "slurm" / "attempt_001")

    def steps(self) -> int:
        """Lines of metrics.jsonl."""
        file = self.run_dir / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def wait(self, what: str, is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait until it is so."""
        begin = time.monotonic()
        while not is_so():
            assert time.monotonic() < begin + limit_s, (
                f"not within {limit_s} s (since {time.strftime('%H:%M:%S', time.localtime(time.time() - limit_s))}): "
                f"{what}; state {self.state}\n{self.everything()}"
            )
            time.sleep(0.3)

    def start_again(self, attempt: int | None = None) -> None:
        """Let a requeued job start at once: Slurm would hold it back for two minutes.

        Args:
            attempt: its number, where Slurm may have started it by now, since nobody looked for minutes.
        """

        def started() -> bool:
            return attempt is not None and self.folder_of_attempt().name == f"attempt_{attempt:03d}"

        # Not sooner: what is left of the first attempt would end the second one (Slurm takes a batch script's exit for
        # that of the attempt that runs then).
        self.wait(
            "requeued, and nothing left of it",
            lambda: started() or (self.state == "PENDING" and not self.processes()),
        )
        if not started():
            time.sleep(3)
            self.slurm.run("scontrol", "update", f"jobid={self.number}", "StartTime=now")

    def ended(self, limit_s: float = LIMIT_S) -> str:
        """Wait for the end; the last line of the log."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "PREEMPTED")
        # Between two attempts Slurm shows the end of the first one for a moment.
        self.wait("ended", lambda: self.state in over and not self._last_words().endswith("; requeued"), limit_s)
        return self.log.strip().splitlines()[-1]

    def _last_words(self) -> str:
        """The last line of the log that is ours and not Slurm's."""
        return next((line for line in reversed(self.log.splitlines()) if line.startswith(f"job {self.number}: ")), "")

    def processes(self) -> list[psutil.Process]:
        """All that live of this job, wherever they hang in the process tree."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def nodes_of(self, title: str) -> set[str]:
        """The nodes on which its Ray actors of this name run."""
        return {p.environ()["SLURMD_NODENAME"] for p in self.processes() if f"ray::{title}" in " ".join(p.cmdline())}

    def everything(self) -> str:
        """Log of the job and of its nodes, the newest attempt's first: what prints this may cut it."""
        logs = sorted(
            (self.run_dir / "slurm").glob("attempt_*/*.log"), key=lambda log: (-int(log.parent.name[8:]), log)
        )
        return self.log + "".join(f"\n== {path}\n{path.read_text()[-3000:]}" for path in logs)
