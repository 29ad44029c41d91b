"""From a claim of samples to an optimizer step."""
