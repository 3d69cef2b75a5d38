"""Rollouts: the ledger of groups, the sampler that fills one training batch, the recorder and its replay."""
