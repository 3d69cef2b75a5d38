"""`python -m megatron_daro` is the console command `megatron-daro`; a missing package is reported in a sentence."""

import signal
import sys


def main() -> int:
    """Run the command line; return its exit code."""
    try:
        from megatron_daro.cli import main as run
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("megatron_daro"):
            raise
        print(
            f"megatron-daro: the package {error.name!r} is not installed in {sys.executable}; fix: pip install -e . in "
            "the checkout, then `megatron-daro doctor`",
            file=sys.stderr,
        )
        return 1
    code = run()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and closed: one more Ctrl-C would only cause a traceback
    return code


if __name__ == "__main__":
    sys.exit(main())
