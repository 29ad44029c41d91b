"""The story of docs/kubernetes.md on a real cluster, any that a kubeconfig names: `make test-cluster`."""
