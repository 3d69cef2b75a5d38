"""Weight transport from the actor to the rollout engines."""
