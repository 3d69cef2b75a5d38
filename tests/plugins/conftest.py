import os

# Read when verl is imported: its engines on the CPU.
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform"}
