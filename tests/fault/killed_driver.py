"""`megatron-daro` that signals itself at an exact place of a step.

Arguments: SIGNAL PLACE AFTER_STEP RUN_DIR FIRED, then those of megatron-daro.

PLACE is a phase of the step as observe.phases measures it ("train": when it is entered, "train:left": when it was left)
"seal" (the shards of a checkpoint are written, its state and manifest are not) or "start" (all processes are there, the
first weights are about to go to the engine). The signal is sent the first time
PLACE is reached with step AFTER_STEP or a later one in RUN_DIR/metrics.jsonl; FIRED then holds place and step.
SIGINT goes to the process group, as from a terminal; other signals to this process only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import driver_stacks

from megatron_daro import cli, durable
from megatron_daro.controller import Controller
from megatron_daro.observe.phases import Phases


@dataclass
class Plan:
    number: signal.Signals
    place: str
    after_step: int
    run_dir: Path
    fired: Path

    def reached(self, place: str) -> None:
        if place != self.place or self.fired.exists() or self._last_step() < self.after_step:
            return
        with self.fired.open("w") as file:
            file.write(f"{place} {self._last_step()}")
            file.flush()
            os.fsync(file.fileno())
        if self.number == signal.SIGINT:
            os.killpg(os.getpgrp(), self.number)
        else:
            os.kill(os.getpid(), self.number)

    def _last_step(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return json.loads(lines[-1])["step"] if lines else -1


def install(plan: Plan) -> None:
    measure, write, run = Phases.measure, durable.write, Controller.run

    @contextmanager
    def measured(self, name):
        plan.reached(name)
        with measure(self, name):
            yield
        plan.reached(f"{name}:left")

    def written(path, content):
        if path.name == "state.json":
            plan.reached("seal")
        return write(path, content)

    async def starting(self):
        plan.reached("start")
        return await run(self)

    Phases.measure, durable.write, Controller.run = measured, written, starting


if __name__ == "__main__":
    driver_stacks.install()
    name, place, after_step, run_dir, fired = sys.argv[1:6]
    install(Plan(signal.Signals[name], place, int(after_step), Path(run_dir), Path(fired)))
    sys.exit(cli.main(sys.argv[6:]))
