#!/usr/bin/env python
"""Hugging Face checkpoint -> Megatron checkpoint; the same as `megatron-daro convert --hf DIR --out DIR`.

    python tools/convert_hf_to_megatron.py --hf DIR --out DIR [--format daro|torch_dist] [--dtype NAME] [--verify]

Exit status: that of the command line (see `megatron-daro --help`).
"""

from __future__ import annotations

import sys

from megatron_daro.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *(sys.argv[1:] or ["--help"])]))
