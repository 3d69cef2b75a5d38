"""SGLang servers and their router as a rollout engine: processes, ports and arguments; requests and weights."""
