"""What the nodes of a Ray cluster have, asked without joining it.

Place in the data flow: RAY_ADDRESS -> (this) -> the configuration's checks, which then judge a layout by the machines
that will run it and not by the one that the command was typed on. Refuses an address where no cluster answers.
"""

from __future__ import annotations

import os
import re

from ray._private import services
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from megatron_daro.config.hardware import Hardware, gpu_nodes
from megatron_daro.errors import ConfigError
from megatron_daro.runtime.cluster_faults import CONNECT_TIMEOUT_S, check_address, plain

_ALIVE = 0  # ray's GcsNodeInfo.ALIVE
_TYPE = "accelerator_type:"


def ask(address: str | None = None) -> Hardware | None:
    """Return what the cluster of RAY_ADDRESS has; None without one.

    Args:
        address: host:port or auto; that of the environment if not given.

    Raises:
        ConfigError: nobody answers there, or not in time.
    """
    address = os.environ.get("RAY_ADDRESS") if address is None else address
    if not address:
        return None
    check_address(address)
    found = services.canonicalize_bootstrap_address(re.sub(r"^\w+://", "", address))
    try:
        nodes = GcsClient(address=found).get_all_node_info(timeout=CONNECT_TIMEOUT_S).values()
    except Exception as error:  # Ray's own classes of this layer are private
        raise ConfigError(
            f"RAY_ADDRESS: got {address!r}, which did not say what its nodes have ({plain(str(error))}); allowed: a "
            "Ray cluster that runs"
        ) from error
    totals = [dict(node.resources_total) for node in nodes if node.state == _ALIVE]
    gpus = [int(total["GPU"]) for total in totals if total.get("GPU")]
    place = f"the Ray cluster at {found}"
    if gpus:
        types = {name.removeprefix(_TYPE) for total in totals for name in total if name.startswith(_TYPE)}
        return gpu_nodes(gpus, types.pop() if len(types) == 1 else None, place)
    cpus = [int(total.get("CPU", 0)) for total in totals]
    return Hardware("cpu", sum(cpus), nodes=tuple(cpus), place=place)
