"""The mathematics of the losses: advantages, surrogate, difficulty weights, weightings, corrections, shaping.

Place in the data flow: scored groups -> bins and advantages (advantages, difficulty, shaping) -> the actor's loss
(objective, surrogate, corrections, regularizers) with one coefficient per rollout (weighting) -> new weights.
Pure torch, one process: no collective call is made here, the totals over ranks are handed in. Refuses to import
anything but torch, numpy, the standard library and the error tree, so that another framework can take the loss alone.
"""
