"""Settings of rehearsals without a recipe's files: three ranks on two of five nodes, two servers on two others."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_daro.config import Config
from megatron_daro.workshop.rehearse.setting import Asked, NodeMap, PlannedTimes, Setting

NODES = NodeMap(5, (0, 0, 1), ((2,), (2, 3)))


def config(**sections: object) -> Config:
    base = {"model": {"path": "x"}, "data": {"train": ("x",)}, "engine": {"kind": "sglang"}}
    return Config.model_validate(base | sections)


def setting_in(**fields: object) -> Setting:
    times = PlannedTimes(10.0, 1.0, 4.0, 2.0)
    base = {
        "asked": Asked("r", steps=3, pace=0.5),
        "full": config(),
        "shape": SimpleNamespace(layers=4),
        "nodes": NODES,
    }  # type: ignore[arg-type]
    return Setting(
        **base | {"workload": SimpleNamespace(staleness=0, generated=100), "times": times, "warnings": (), **fields}
    )  # type: ignore[arg-type]
