"""Modules that run inside SGLang's processes. Their folder is put on a server's PYTHONPATH, so that the server finds
nothing else of this package. `loader` in config/transports.py says which transport needs which module."""

from pathlib import Path

FOLDER = Path(__file__).parent
