"""What the coordinator does in a Kubernetes cluster. Optional, and a run goes on without it."""
