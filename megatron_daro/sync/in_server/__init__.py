"""What runs inside SGLang's processes: modules in a folder of their own, for a server's PYTHONPATH, where it finds
nothing else of this package. Which transport needs which of them: `loader` in config/transports.py."""

from pathlib import Path

FOLDER = Path(__file__).parent
