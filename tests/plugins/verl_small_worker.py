"""verl's worker without a model: its actor is of the class that verl would make it of, and trains nothing."""

from __future__ import annotations

import importlib
import os

from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker


class SmallWorker(ActorRolloutRefWorker):
    """Loads the plug-in on the ranks that RANKS_WITH_DARO names, as an installation on their nodes would."""

    def __init__(self) -> None:
        super(ActorRolloutRefWorker, self).__init__()
        if os.environ["RANK"] in os.environ["RANKS_WITH_DARO"].split(","):
            importlib.import_module("megatron_daro.plugins.verl")
        self.actor = object.__new__(ActorRolloutRefWorker.actor_worker_cls)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_actor(self, data: object) -> str:
        return type(self.actor).__name__
