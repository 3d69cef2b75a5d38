"""What a run tells people: metrics on disk, progress on the terminal, time per phase, the HTML report.

Place in the data flow: the controller hands each step's metrics to `MetricsLog` and `Progress`; `write_report` reads
only the run directory. Imports no torch, and reads model output as data: whatever it prints or draws is escaped
first.

The report is imported from `megatron_daro.observe.report`, since plotly is slow to load and training does not need
it.
"""

from megatron_daro.observe.escape import safe_text
from megatron_daro.observe.metrics import MetricsLog, comparable, read_metrics
from megatron_daro.observe.progress import Progress
from megatron_daro.observe.trace import Phases

__all__ = ["MetricsLog", "Phases", "Progress", "comparable", "read_metrics", "safe_text"]
