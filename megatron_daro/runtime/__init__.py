"""Processes: placement, Ray actors (thin shells around actor/ and engine/), supervision, and the launch of a run.

The only package that imports ray.
"""
