"""`npuserve bench serve|step|kernels`: the load generator and its report, the engine's step, and single kernels."""
