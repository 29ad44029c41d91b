"""The rollouter: one vLLM engine that turns prompts into version-tagged samples."""
