#!/usr/bin/env python
"""Megatron checkpoint -> Hugging Face checkpoint; the same as `megatron-daro convert --megatron DIR --out DIR`.

    python tools/convert_megatron_to_hf.py --megatron DIR --out DIR [--hf-config DIR] [--max-shard-size 5GB] [--verify]

Exit status: that of the command line (see `megatron-daro --help`).
"""

from __future__ import annotations

import sys

from megatron_daro.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *(sys.argv[1:] or ["--help"])]))
