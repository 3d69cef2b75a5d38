"""What a run tells people: metrics on disk, progress on the terminal, time per phase; what models wrote is escaped.

Place in the data flow: the controller hands each step's metrics to `MetricsLog` and `Progress`. Imports no torch, and
reads model output as data: whatever it prints is escaped first. The HTML report is megatron_daro/workshop/report.
"""

from megatron_daro.observe.logs import safe_text
from megatron_daro.observe.metrics import MetricsLog, comparable, read_metrics
from megatron_daro.observe.phases import Phases
from megatron_daro.observe.progress import Progress

__all__ = ["MetricsLog", "Phases", "Progress", "comparable", "read_metrics", "safe_text"]
