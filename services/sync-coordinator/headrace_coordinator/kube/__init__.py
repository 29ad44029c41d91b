"""The coordinator's Kubernetes integration. It is optional, and a run survives its failure."""
