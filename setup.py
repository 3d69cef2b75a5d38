"""Packaging of megatron_daro. Ranges are those that were tested together; requirements.txt pins the same.

With MEGATRON_DARO_DISTRIBUTION=algo in the environment it is megatron-daro-algo: algorithms and adapters alone, under
the same import name, for other frameworks' environments, which decide on their own versions of torch and the rest.
"""

import os
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
ALGO = ("algo", "plugins", "config", "families")
"""Packages of megatron-daro-algo: its algorithms and adapters, and what those import."""
ALGO_MODULES = ("__init__", "errors", "durable", "options")


class AlgoModules(build_py):
    """Take only the modules of the package's top that algorithms and adapters import."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """List (package, module, file)."""
        found = super().find_package_modules(package, package_dir)
        return [row for row in found if row[0] != "megatron_daro" or row[1] in ALGO_MODULES]


def read_requirements() -> list[str]:
    lines = (line.split("#")[0].strip() for line in (HERE / "requirements.txt").read_text().splitlines())
    return [line for line in lines if line]


def algo_distribution() -> dict[str, object]:
    """Return what differs in megatron-daro-algo."""
    packages = [name for part in ALGO for name in (f"megatron_daro.{part}", f"megatron_daro.{part}.*")]
    return {
        "name": "megatron-daro-algo",
        "description": "Difficulty-aware RL losses (DARO) inside verl, slime, miles, NeMo-RL, ROLL and Megatron-LM",
        "long_description": (HERE / "megatron_daro" / "plugins" / "README.md").read_text(),
        "python_requires": ">=3.10",
        "packages": find_packages(include=["megatron_daro", *packages]),
        "package_data": {"megatron_daro": ["py.typed"]},
        "install_requires": ["torch>=2.4", "numpy>=1.26", "pydantic>=2.7", "pyyaml>=6", "typing-extensions>=4.10"],
        "extras_require": {},
        "entry_points": {"verl.plugins": ["megatron_daro=megatron_daro.plugins.verl_plugin"]},
        "cmdclass": {"build_py": AlgoModules},
    }


whole = {
    "name": "megatron_daro",
    "version": "0.1.0",
    "description": "Difficulty-aware reinforcement learning (DARO) on Megatron-core",
    "long_description": (HERE / "README.md").read_text(),
    "long_description_content_type": "text/markdown",
    "license": "Apache-2.0",
    "python_requires": ">=3.11",
    "packages": find_packages(include=["megatron_daro", "megatron_daro.*"]),
    "package_data": {"megatron_daro": ["py.typed", "workshop/report/assets/*"]},
    "install_requires": read_requirements(),
    "extras_require": {
        # By the Megatron-core that pip takes: 0.16.1 with Python 3.11, whose own metadata has this range; else 0.19.
        "gpu": [
            'transformer_engine[pytorch]>=2.9,<2.12; python_version < "3.12"',
            'transformer_engine[pytorch]>=2.9,<2.21; python_version >= "3.12"',
        ],
        "dev": [
            "pytest>=9,<10",
            "pytest-timeout>=2.4,<3",
            "pytest-xdist>=3.8,<4",
            "hypothesis>=6.170,<7",
            "zstandard>=0.23,<0.26",
            "filelock>=3,<5",
            "cosmic-ray>=8.7,<9",
            "ruff>=0.17,<0.18",
            "mypy>=2.4,<3",
            "pre-commit>=4,<5",
        ],
        "wandb": ["wandb>=0.20"],
        "agents": ["openai>=3,<4"],
    },
    "entry_points": {
        "console_scripts": ["megatron-daro=megatron_daro.__main__:main"],
        "verl.plugins": ["megatron_daro=megatron_daro.plugins.verl_plugin"],
    },
}
setup(**(whole | algo_distribution() if os.environ.get("MEGATRON_DARO_DISTRIBUTION") == "algo" else whole))
