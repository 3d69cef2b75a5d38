"""What a run shows to people: metrics on disk, progress on the terminal, time per phase.

Place in the data flow: the controller passes each step's metrics to `MetricsLog` and `Progress`. Imports no torch, and
treats model output as data: text is escaped before it is printed. The HTML report is megatron_daro/workshop/report.
"""

from megatron_daro.observe.logs import safe_text
from megatron_daro.observe.metrics import MetricsLog, comparable, read_metrics
from megatron_daro.observe.phases import Phases
from megatron_daro.observe.progress import Progress

__all__ = ["MetricsLog", "Phases", "Progress", "comparable", "read_metrics", "safe_text"]
