"""What runs inside SGLang's processes: modules in a folder of their own, for a server's PYTHONPATH, where it finds
nothing else of this package."""

from pathlib import Path

LOADER = "megatron_daro_shards.receive"
"""What SGLang's `--custom-weight-loader` and `load_format` name."""
FOLDER = Path(__file__).parent
