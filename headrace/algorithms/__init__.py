"""The algorithms: pure tensor functions that depend on torch alone.

One registry per seam, each filled on first use: `estimator.ADVANTAGE_ESTIMATORS`,
`policy_loss.POLICY_LOSSES`, `aggregation.AGGREGATIONS`, `kl.KL_PENALTIES`,
`importance_weights.IMPORTANCE_WEIGHTS` and `rejection.REJECTION_CRITERIA` (the last two make up the rollout
correction). Code outside the project adds its own with `registry.load_module`.

Everywhere: (B, T) tensors are padded on the right, a mask is 1 where a token counts, the dtype of the inputs
is kept, and what lies outside the mask never influences anything, not even as inf or nan.
"""
