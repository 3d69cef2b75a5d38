"""SGLang servers as a rollout engine: processes, ports and arguments; requests and weights."""
