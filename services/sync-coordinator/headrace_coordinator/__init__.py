"""The sync coordinator: membership, the policy version, sync rounds. It never sees a sample."""
