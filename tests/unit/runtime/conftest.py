"""Makes the batches of tests/unit/data and the fakes of the loop importable when this folder is tested alone."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "data"), str(Path(__file__).parents[1] / "rollout")]
