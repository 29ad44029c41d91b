"""The sharded models of a rank: policy, critic, reference, optimizer."""
