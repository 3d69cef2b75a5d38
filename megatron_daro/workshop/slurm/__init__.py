"""Jobs on Slurm: from a recipe and a cluster file to one readable batch script, and what runs on each node of the job.

Place in the data flow: `megatron-daro submit` -> script -> sbatch; on the nodes `python -m
megatron_daro.workshop.slurm.node` checks the node, joins Ray and, on the first one, trains.
docs/cluster.md. Imports no torch and no Ray.
"""
