"""A rehearsal of a large run on one machine: the real driver over thin ranks and canned servers (docs/plan.md)."""
