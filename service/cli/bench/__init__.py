"""`npuserve bench serve|step|kernels`."""
