"""Makes the fakes of the loop importable when this folder is tested alone."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
