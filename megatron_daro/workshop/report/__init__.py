"""The HTML report: what a run directory, or the metrics of a host framework, says on one page without a network."""
