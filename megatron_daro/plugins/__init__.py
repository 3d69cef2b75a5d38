"""DARO inside recipes that people already run: one core, and one adapter per host framework.

Place in the data flow: a host's rollouts -> bins -> coefficients of its token losses -> loss sums -> new weights.
`core` has the order of the calls and no name of a host; an adapter translates and holds no mathematics. Needs the
algorithms, the options and the error tree of this package: neither Ray nor Megatron nor an initialised process group.
Refuses, with an error that names the missing flag, to train when the host does not deliver what the loss needs.
"""
