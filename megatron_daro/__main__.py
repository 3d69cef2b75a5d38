"""`python -m megatron_daro` is the console command `megatron-daro`."""

import sys

from megatron_daro.cli import main

sys.exit(main())
