"""The parallel oracle: is somebody's loss exact under DP, CP, TP, PP and micro-batches, against one process?

Place in the data flow: a function that Megatron's schedules call -> many small cases on gloo processes -> the smallest
case that differs, its likely cause, and a script that repeats it. The same function on one process with one micro-batch
in float64 is the reference, so any weighting of tokens is allowed, as long as it does not depend on the layout.
docs/plugins.md has the contract of the function and a worked example.
"""
