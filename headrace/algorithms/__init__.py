"""The algorithms: pure tensor functions that depend on torch alone.

`registries` has every algorithm by name, with what it needs; `checks` compares a configuration with them.
The parts of the rollout correction are in `importance_weights` and `rejection`.

Everywhere: (B, T) tensors are padded on the right, a mask is 1 where a token counts, the dtype of the inputs
is kept, and what lies outside the mask never influences anything, not even as inf or nan.
"""
